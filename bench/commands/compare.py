"""Compares two results of one command and fails where the newer one is slower beyond noise.

    python -m bench compare before.json after.json

Both are of `bench step`, or both of links, kernels, overlap, buckets or scale.
Compared is, where a result has it, the ratio to its baseline, which a slower machine leaves as it
is, else seconds. A regression is a median that grew by more than --threshold while the quartiles
of the two results do not overlap. What is gone is one too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.common.ranks import FAILED, Parser, UsageError, argument, guarded
from examples.common.rounds import SCHEMA
from examples.common.text import Spread, render

SAME_SETTINGS = ("baseline", "optimizer", "scale", "device")
SAME_MACHINE = ("cpu", "cores", "gpu", "ranks", "threads_per_rank", "transport")
Comparison = tuple[str, Spread | None, Spread | None]  # what was measured, before and after


def verdict(before: Spread | None, after: Spread | None, threshold: float) -> str:
    """ "REGRESSION", "better", "MISSING", "new" or "" for no change beyond noise."""
    if before is None or after is None:
        return "new" if before is None else "MISSING"
    if after.median > before.median * (1 + threshold) and after.q1 > before.q3:
        return "REGRESSION"
    better = after.median < before.median * (1 - threshold) and after.q3 < before.q1
    return "better" if better else ""


def row(compared: Comparison, threshold: float) -> tuple[str, ...]:
    """Of the table that is printed."""
    name, before, after = compared
    cells = ("-" if s is None else f"{s.median:.4f} ±{s.width / 2:.4f}" for s in (before, after))
    growth = f"{after.median / before.median - 1:+.1%}" if before and after else "-"
    return name, *cells, growth, verdict(before, after, threshold)


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


def spreads(result: dict[str, Any]) -> Iterator[tuple[str, Spread]]:
    """What was measured, and its name."""
    for found in result.get("points", ()):
        yield "/".join(found["of"]), Spread(**found.get("ratio", found["time"]))
    scenes = dict(result.get("models", {}))
    for r in result.get("links", ()):
        scenes[f"{r['link']}/{r['ranks']} ranks/{r['model']}"] = r
    for scene, record in scenes.items():
        for name, values in record["variants"].items():
            yield f"{scene}/{name}", Spread(**values["ratio"])


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Comparison]:
    """Everything in both results, in the order of `before`.

    Raises:
        UsageError: they are results of different commands.
    """
    if before["kind"] != after["kind"]:
        wrong = f"bench {before['kind']} and bench {after['kind']}"
        raise UsageError(f"{wrong} measure different things")
    old, new = dict(spreads(before)), dict(spreads(after))
    return [(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]


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
        argument("--threshold", "relative growth that counts", 0.05, type=float),
        argument("--markdown", "print the table as Markdown", action="store_true"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    def start() -> int:
        args = parser().parse_args(argv)
        before, after = load(args.before), load(args.after)
        compared = compare(before, after)
        for difference in differences(before, after):
            print(f"note: results differ in {difference}")
        rows = [row(each, args.threshold) for each in compared]
        headers = ("measured", "before", "after", "change", "verdict")
        print(render(headers, rows, args.markdown))
        bad = [row for row in rows if row[-1] in ("REGRESSION", "MISSING")]
        print(f"\n{len(bad)} regression(s) in {len(rows)} comparisons")
        return FAILED if bad else 0

    return guarded(start)
