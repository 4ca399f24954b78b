"""Compares two results of bench.step and fails where the newer one is slower beyond noise.

    python -m bench.compare before.json after.json

Compared is, for each model and variant, the ratio to the baseline, which a slower machine leaves as
it is (--metric step compares seconds). A regression is a median that grew by more than --threshold
while the quartiles of the two results do not overlap. A variant or model that is gone is one too.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.stats import Spread
from bench.step import SCHEMA
from bench.tables import render

REGRESSION = 1
USAGE = 2
SAME_MACHINE = ("cpu", "cores", "gpu", "ranks", "threads_per_rank", "transport")


@dataclass(frozen=True)
class Change:
    """One variant of one model in two results; None where a result lacks it."""

    model: str
    variant: str
    before: Spread | None
    after: Spread | None

    @property
    def growth(self) -> float | None:
        """The relative growth of the median: 0.05 is 5 % slower."""
        if self.before is None or self.after is None:
            return None
        return self.after.median / self.before.median - 1.0

    def verdict(self, threshold: float) -> str:
        """ "REGRESSION", "better", "missing", "new" or "" for no change beyond noise."""
        if self.before is None:
            return "new"
        if self.after is None:
            return "MISSING"
        growth = self.after.median / self.before.median - 1.0
        if growth > threshold and self.after.q1 > self.before.q3:
            return "REGRESSION"
        if growth < -threshold and self.after.q3 < self.before.q1:
            return "better"
        return ""


def load(path: Path) -> dict[str, Any]:
    """Reads a result.

    Raises:
        UsageError: the file is no result of bench.step, or of another version of it.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{path.name}: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise UsageError(f"{path.name}: expects a result of bench.step, schema {SCHEMA}")
    return result


def spreads(result: dict[str, Any], metric: str) -> dict[tuple[str, str], Spread]:
    """The chosen metric ("ratio" or "step") by (model, variant)."""
    return {
        (model, variant): Spread(**values[metric])
        for model, record in result["models"].items()
        for variant, values in record["variants"].items()
    }


def compare(before: dict[str, Any], after: dict[str, Any], metric: str) -> list[Change]:
    """All variants of both results, in the order of `before`."""
    old, new = spreads(before, metric), spreads(after, metric)
    return [Change(*key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where the two results were measured under unlike conditions."""
    pairs = [(n, before["environment"][n], after["environment"][n]) for n in SAME_MACHINE]
    pairs += [(n, before["settings"][n], after["settings"][n]) for n in ("baseline", "optimizer")]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def _row(change: Change, threshold: float) -> tuple[str, ...]:
    def cell(spread: Spread | None) -> str:
        return "-" if spread is None else f"{spread.median:.4f} ±{spread.width / 2:.4f}"

    growth = "-" if change.growth is None else f"{100 * change.growth:+.1f} %"
    name = f"{change.model}/{change.variant}"
    return name, cell(change.before), cell(change.after), growth, change.verdict(threshold)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--metric", choices=("ratio", "step"), default="ratio")
    parser.add_argument("--threshold", type=float, default=0.05, help="relative (default: 0.05)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    try:
        before, after = load(args.before), load(args.after)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    for difference in differences(before, after):
        print(f"note: results differ in {difference}")
    changes = compare(before, after, args.metric)
    rows = [_row(change, args.threshold) for change in changes]
    headers = ("model/variant", f"{args.metric} before", "after", "change", "verdict")
    print(render(headers, rows, args.markdown))
    bad = [c for c in changes if c.verdict(args.threshold) in ("REGRESSION", "MISSING")]
    print(f"\n{len(bad)} regression(s) in {len(changes)} comparisons")
    return REGRESSION if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
