"""Compares two results of one command and fails where the newer one is slower beyond noise.

    python -m bench compare before.json after.json

Both are of `bench step`, or both of links, kernels, overlap, buckets or scale.
Compared is, where a result has it, the ratio to its baseline, which a slower machine leaves as it
is; --metric time compares seconds. A regression is a median that grew by more than --threshold
while the quartiles of the two results do not overlap. What is gone is one too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.common.ranks import FAILED, Parser, UsageError, argument, guarded
from examples.common.rounds import SCHEMA
from examples.common.text import Spread, render

RATIO, TIME = "ratio", "time"
SAME_SETTINGS = ("baseline", "optimizer", "scale", "device")
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
        """ "REGRESSION", "better", "MISSING", "new" or "" for no change beyond noise."""
        if self.before is None:
            return "new"
        if self.after is None:
            return "MISSING"
        growth = self.growth
        if growth is not None and growth > threshold and self.after.q1 > self.before.q3:
            return "REGRESSION"
        if growth is not None and growth < -threshold and self.after.q3 < self.before.q1:
            return "better"
        return ""

    def row(self, threshold: float) -> tuple[str, ...]:
        """Of the table that is printed."""
        both = (self.before, self.after)
        cells = ("-" if s is None else f"{s.median:.4f} ±{s.width / 2:.4f}" for s in both)
        growth = "-" if self.growth is None else f"{100 * self.growth:+.1f} %"
        return self.name, *cells, growth, self.verdict(threshold)


def load(path: Path) -> dict[str, Any]:
    """Reads a result.

    Raises:
        UsageError: the file is no result that can be compared, or of another version of its kind.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{path.name}: {error}") from error
    comparable = isinstance(result, dict) and result.get("kind") not in (None, "table")
    if not comparable or result.get("schema") != SCHEMA:
        raise UsageError(f"{path.name}: expects a result of a benchmark, of this version's schema")
    return dict(result)


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
    scenes = dict(result.get("models", {}))
    for r in result.get("links", ()):
        scenes[f"{r['link']}/{r['ranks']} ranks/{r['model']}"] = r
    for scene, record in scenes.items():
        yield from ((f"{scene}/{name}", values) for name, values in record["variants"].items())


def compare(before: dict[str, Any], after: dict[str, Any], metric: str) -> list[Change]:
    """Everything in both results, in the order of `before`.

    Raises:
        UsageError: they are results of different commands.
    """
    if before["kind"] != after["kind"]:
        wrong = f"bench {before['kind']} and bench {after['kind']}"
        raise UsageError(f"{wrong} measure different things")
    old, new = spreads(before, metric), spreads(after, metric)
    return [Change(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where the two results were measured under unlike conditions."""
    pairs = [(n, before["environment"][n], after["environment"][n]) for n in SAME_MACHINE]
    settings = (before["settings"], after["settings"])
    pairs += [(n, *(each.get(n) for each in settings)) for n in SAME_SETTINGS]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def parser() -> Parser:
    """The command line."""
    return Parser(
        "bench compare",
        __doc__,
        argument("before", "the older result", type=Path),
        argument("after", "the newer one", type=Path),
        argument("--metric", "what is compared", RATIO, choices=(RATIO, TIME)),
        argument("--threshold", "relative growth that counts", 0.05, type=float),
        argument("--markdown", "print the table as Markdown", action="store_true"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    def start() -> int:
        args = parser().parse_args(argv)
        before, after = load(args.before), load(args.after)
        changes = compare(before, after, args.metric)
        for difference in differences(before, after):
            print(f"note: results differ in {difference}")
        rows = [change.row(args.threshold) for change in changes]
        headers = ("measured", f"{args.metric} before", "after", "change", "verdict")
        print(render(headers, rows, args.markdown))
        bad = [row for row in rows if row[-1] in ("REGRESSION", "MISSING")]
        print(f"\n{len(bad)} regression(s) in {len(changes)} comparisons")
        return FAILED if bad else 0

    return guarded(start)
