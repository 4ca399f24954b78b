"""Text tables: aligned for terminals, or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.harness import Timing
from bench.stats import Spread
from bench.wrappers import FLOOR

Row = Sequence[str]


def render(headers: Row, rows: Sequence[Row], markdown: bool = False) -> str:
    """A table whose first column is aligned to the left and all others to the right."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    rule = ["-" * (w - 1) + (":" if markdown and i else "-") for i, w in enumerate(widths)]
    lines = [_align(headers, widths), rule, *(_align(row, widths) for row in rows)]
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _align(row: Row, widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def milliseconds(spread: Spread | None) -> tuple[str, str]:
    """The median and half the inter-quartile range in ms, of a spread in seconds."""
    if spread is None:
        return "-", "-"
    return f"{1e3 * spread.median:.2f}", f"{1e3 * spread.width / 2:.2f}"


def ratio(spread: Spread) -> tuple[str, str]:
    """The median and half the inter-quartile range."""
    return f"{spread.median:.3f}", f"{spread.width / 2:.3f}"


def timing_table(timings: Sequence[Timing], baseline: str, markdown: bool = False) -> str:
    """One row per variant; ± is half the range between the quartiles of the rounds."""
    headers = ("variant", "step ms", "±", f"ratio to {baseline}", "±", "exposed ms", "±", "weights")
    rows = [
        (t.variant, *milliseconds(t.step), *ratio(t.ratio), *milliseconds(t.exposed), t.check)
        for t in timings
    ]
    return render(headers, rows, markdown)


def links_table(record: dict[str, Any], markdown: bool = False) -> str:
    """One row per variant of a record of bench.links; see there for what the columns mean."""
    headers = (
        *("variant", "step ms", "±", "ratio", "sync ms", "±", "sync ratio"),
        *("MB sent", "of formula", "limit ms", "sync / limit", "weights"),
    )
    rows = [_link_row(name, timing) for name, timing in record["variants"].items()]
    return render(headers, rows, markdown)


def _link_row(name: str, timing: dict[str, Any]) -> Row:
    exposed = Spread(**timing["exposed"])
    formula, limit = timing["formula_bytes"], timing["limit_seconds"]
    sent = timing["sent_bytes"]
    synced = name != FLOOR
    return (
        name,
        *milliseconds(Spread(**timing["step"])),
        f"{timing['ratio']['median']:.3f}",
        *milliseconds(exposed),
        f"{timing['exposed_ratio']['median']:.3f}" if timing["exposed_ratio"] else "-",
        f"{sent / 1e6:.2f}",
        f"{sent / formula:.3f}" if synced and formula else "-",
        f"{1e3 * limit:.2f}" if synced and limit else "-",
        f"{exposed.median / limit:.3f}" if synced and limit else "-",
        timing["check"],
    )
