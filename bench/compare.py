"""Compares two results of one command and fails where the newer one is slower beyond noise.

    python -m bench.compare before.json after.json

Both are of bench.step, or both of bench.links, kernels, collectives, overlap, buckets or scale.
Compared is, where a result has it, the ratio to its baseline, which a slower machine leaves as it
is; --metric time compares seconds. A regression is a median that grew by more than --threshold
while the quartiles of the two results do not overlap. What is gone is one too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import links, points
from bench.errors import UsageError
from bench.stats import Spread
from bench.step import SCHEMA
from bench.tables import render

REGRESSION = 1
USAGE = 2
STEP = "step"
RATIO, TIME = "ratio", "time"
SAME_SETTINGS = ("baseline", "optimizer", "scale", "device", "wait")
SAME_MACHINE = ("cpu", "cores", "gpu", "ranks", "threads_per_rank", "transport")


@dataclass(frozen=True)
class Change:
    """One thing that two results measured; None where a result lacks it."""

    name: str
    before: Spread | None
    after: Spread | None

    @property
    def growth(self) -> float | None:
        """The relative growth of the median: 0.05 is 5 % slower. None where there is none."""
        if self.before is None or self.after is None or self.before.median <= 0.0:
            return None
        return self.after.median / self.before.median - 1.0

    def verdict(self, threshold: float) -> str:
        """ "REGRESSION", "better", "missing", "new" or "" for no change beyond noise."""
        if self.before is None:
            return "new"
        if self.after is None:
            return "MISSING"
        growth = self.growth
        if growth is None:
            return ""
        if growth > threshold and self.after.q1 > self.before.q3:
            return "REGRESSION"
        if growth < -threshold and self.after.q3 < self.before.q1:
            return "better"
        return ""


def load(path: Path) -> dict[str, Any]:
    """Reads a result.

    Raises:
        UsageError: the file is no result that can be compared, or of another version of its kind.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{path.name}: {error}") from error
    known = {STEP: SCHEMA, links.KIND: links.SCHEMA}
    kind = kind_of(result) if isinstance(result, dict) else None
    if kind is None or result.get("schema") != known.get(kind, points.SCHEMA):
        raise UsageError(f"{path.name}: expects a result of a benchmark, of this version's schema")
    return dict(result)


def kind_of(result: dict[str, Any]) -> str | None:
    """Which command made a result; None where none did that can be compared."""
    if "points" in result or "links" in result:
        return str(result.get("kind"))
    return STEP if "models" in result else None


def spreads(result: dict[str, Any], metric: str) -> dict[str, Spread]:
    """What was measured, by name: ratios, or seconds where a result has none."""
    found = {}
    for name, values in _measurements(result):
        chosen = values.get("ratio") if metric == RATIO else None
        found[name] = Spread(**(chosen or values.get("time") or values["step"]))
    return found


def _measurements(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for found in result.get("points", ()):
        yield "/".join(found["of"]), found
    for record in result.get("links", ()):
        scene = f"{record['link']}/{record['ranks']} ranks/{record['model']}"
        yield from ((f"{scene}/{name}", values) for name, values in record["variants"].items())
    for model, record in result.get("models", {}).items():
        yield from ((f"{model}/{name}", values) for name, values in record["variants"].items())


def compare(before: dict[str, Any], after: dict[str, Any], metric: str) -> list[Change]:
    """Everything in both results, in the order of `before`.

    Raises:
        UsageError: they are results of different commands.
    """
    kinds = kind_of(before), kind_of(after)
    if kinds[0] != kinds[1]:
        raise UsageError(f"bench.{kinds[0]} and bench.{kinds[1]} measure different things")
    old, new = spreads(before, metric), spreads(after, metric)
    return [Change(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where the two results were measured under unlike conditions."""
    pairs = [(n, before["environment"][n], after["environment"][n]) for n in SAME_MACHINE]
    settings = (before["settings"], after["settings"])
    pairs += [(n, *(each.get(n) for each in settings)) for n in SAME_SETTINGS]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def _row(change: Change, threshold: float) -> tuple[str, ...]:
    def cell(spread: Spread | None) -> str:
        return "-" if spread is None else f"{spread.median:.4f} ±{spread.width / 2:.4f}"

    growth = "-" if change.growth is None else f"{100 * change.growth:+.1f} %"
    return change.name, cell(change.before), cell(change.after), growth, change.verdict(threshold)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--metric", choices=(RATIO, TIME), default=RATIO)
    parser.add_argument("--threshold", type=float, default=0.05, help="relative (default: 0.05)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    try:
        before, after = load(args.before), load(args.after)
        changes = compare(before, after, args.metric)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    for difference in differences(before, after):
        print(f"note: results differ in {difference}")
    rows = [_row(change, args.threshold) for change in changes]
    headers = ("measured", f"{args.metric} before", "after", "change", "verdict")
    print(render(headers, rows, args.markdown))
    bad = [c for c in changes if c.verdict(args.threshold) in ("REGRESSION", "MISSING")]
    print(f"\n{len(bad)} regression(s) in {len(changes)} comparisons")
    return REGRESSION if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
