"""Text output: medians with their spread, tables, and progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from examples.common.ranks import Group

PROGRESS_SECONDS = 15.0  # between lines where the output is no terminal

Row = Sequence[str]


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a measurement, in the unit of its samples."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        several = samples if len(samples) > 1 else [*samples, *samples]  # what quantiles expects
        q1, middle, q3 = quantiles(several, n=4, method="inclusive")
        return cls(middle, q1, q3)

    @property
    def width(self) -> float:
        """Return the inter-quartile range."""
        return self.q3 - self.q1

    def margin(self, samples: int) -> float:
        """Return half the 95 % interval of the median of so many independent samples.

        (McGill, Tukey and Larsen, "Variations of box plots", 1978.)
        """
        return 1.57 * self.width / math.sqrt(samples)


def milliseconds(spread: Spread) -> tuple[str, str]:
    """Return the median and half the inter-quartile range in ms, of a spread in seconds."""
    return f"{1e3 * spread.median:.2f}", f"{1e3 * spread.width / 2:.2f}"


def times(value: float | None) -> str:
    """Return a multiple of something, which may be unknown."""
    return "n/a" if value is None else f"{value:.2f}x"


def ratio(spread: Spread) -> tuple[str, str]:
    """Return the median and half the inter-quartile range."""
    return f"{spread.median:.3f}", f"{spread.width / 2:.3f}"


def render(headers: Row, rows: Sequence[Row], markdown: bool = False) -> str:
    """Return a table whose first column is aligned to the left and all others to the right."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    rule = ["-" * (w - 1) + (":" if markdown and i else "-") for i, w in enumerate(widths)]
    lines = [_align(headers, widths), rule, *(_align(row, widths) for row in rows)]
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _align(row: Row, widths: list[int]) -> list[str]:
    first, *others = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


@dataclass
class Progress:
    """One line on the terminal of rank 0, rewritten; elsewhere a line now and then."""

    group: Group
    last: float = field(default_factory=time.monotonic)

    def show(self, text: str) -> None:
        if not self.group.is_main:
            return
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last > PROGRESS_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self.last = time.monotonic()

    def clear(self) -> None:
        """Make room for a line that stays."""
        self.last = time.monotonic()
        if self.group.is_main and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
