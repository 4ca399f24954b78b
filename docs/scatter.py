"""A picture of pairs of positive numbers on two logarithmic axes, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from bench.report.charts import COLOURS, RULE, Labels, polyline
from docs.make_figures import FAINT, HEIGHT, document, text

__all__ = ["Pair", "scatter_chart"]

Pair = tuple[float, float]  # across and up
LEFT, RIGHT, TOP, BOTTOM = 80, 600, 50, HEIGHT - 54  # of the frame
Place = Callable[[float], float]


def scatter_chart(labels: Labels, pairs: Mapping[str, Sequence[Pair]], band: float) -> str:
    """A dot for each pair, a colour for each group, the diagonal, and where it is missed by `band`.

    Args:
        band: the distance as a share: 0.15 for lines at 1.15 and 0.85.
    """
    values = [value for group in pairs.values() for pair in group for value in pair]
    low, high = min(values) / 1.2, max(values) * 1.2
    across, up = _places(low, high)
    parts = [
        text(LEFT, 28, labels.title, 15, font_weight="bold"),
        text((LEFT + RIGHT) / 2, HEIGHT - 14, labels.x, 12, FAINT, text_anchor="middle"),
        text(LEFT, TOP - 6, labels.y, 12, FAINT),
        *_grid(low, high, across, up),
    ]
    for share in (1.0, 1 + band, 1 - band):
        ends = max(low, low / share), min(high, high / share)
        line = [(across(x), up(share * x)) for x in ends]
        parts.append(polyline(line, FAINT, 1.2, dashed=share != 1.0))
    for index, (name, group) in enumerate(pairs.items()):
        colour, y = COLOURS[index % len(COLOURS)], TOP + 12 + 22 * index
        parts += [_dot(across(x), up(y_), colour) for x, y_ in group]
        parts += [_dot(RIGHT + 30, y, colour), text(RIGHT + 42, y + 4, name)]
    below = f"dashed: {band:.0%} off"
    parts.append(text(RIGHT + 24, TOP + 20 + 22 * len(pairs), below, 12, FAINT))
    return document(parts)


def _places(low: float, high: float) -> tuple[Place, Place]:
    span = math.log(high / low)
    return (
        lambda value: LEFT + math.log(value / low) / span * (RIGHT - LEFT),
        lambda value: BOTTOM - math.log(value / low) / span * (BOTTOM - TOP),
    )


def _grid(low: float, high: float, across: Place, up: Place) -> list[str]:
    """Lines at 1, 2 and 5 of each power of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [m for p in powers for m in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if low <= m <= high]
    parts = []
    for mark in marks:
        parts.append(polyline([(across(mark), TOP), (across(mark), BOTTOM)], RULE, 1))
        parts.append(polyline([(LEFT, up(mark)), (RIGHT, up(mark))], RULE, 1))
        parts.append(text(across(mark), BOTTOM + 16, f"{mark:g}", 11, FAINT, text_anchor="middle"))
        parts.append(text(LEFT - 8, up(mark) + 4, f"{mark:g}", 11, FAINT, text_anchor="end"))
    return parts


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.75"/>'
