"""Charts as SVG text: lines over a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 220, 44, 52  # margins; the legend is at the right
INK, FAINT, PAPER, RULE = "#24292f", "#6e7781", "#ffffff", "#d8dee4"
# Told apart also by those who do not see red and green alike (Okabe and Ito, 2008).
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#000000", "#999999", "#882255", "#44aa99", "#ddcc77", "#117733"),
)
TICKS = 5
ROOM = 44  # between the texts of two marks

Place = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Labels:
    """The texts around a chart."""

    title: str
    x: str
    y: str


@dataclass(frozen=True)
class Line:
    """One line of a chart; a dashed one is a reference."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def text(x: float, y: float, words: str, size: int = 12, **style: str) -> str:
    """Return one line of text; underscores in the names of attributes become hyphens."""
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{more}>{escape(words)}</text>'


def polyline(places: Sequence[Place], colour: str, width: float, dashed: bool = False) -> str:
    """Return a line through places."""
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
    )


def line_chart(labels: Labels, lines: Sequence[Line], log_y: bool = False) -> str:
    """Draw lines over a logarithmic axis; the vertical one begins at 0 unless `log_y`."""
    xs = sorted({x for each in lines for x, _ in each.points})
    ys = [y for each in lines for _, y in each.points if y > 0]
    place = _logarithmic(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    if log_y:
        height = _logarithmic(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
        powers = range(math.floor(math.log10(min(ys))), math.floor(math.log10(max(ys))) + 2)
        marks = [10.0**k for k in powers if min(ys) <= 10.0**k <= max(ys)]
    else:
        marks = nice_marks(max(ys))
        height = _linear(marks[-1], HEIGHT - BOTTOM, TOP)
    parts, last = _frame(labels, marks, height), -math.inf
    for x in xs:
        if place(x) - last > ROOM:
            last, y = place(x), HEIGHT - BOTTOM + 18
            parts.append(text(last, y, f"{x:g}", 11, text_anchor="middle", fill=FAINT))
    for index, drawn in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        places = [(place(x), height(y)) for x, y in drawn.points]
        parts.append(polyline(places, colour, 2, drawn.dashed))
        for left, up in () if drawn.dashed else places:
            parts.append(f'<circle cx="{left:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>')
        parts += _legend(index, drawn.name, colour, drawn.dashed)
    return _document(parts)


def nice_marks(largest: float) -> list[float]:
    """Round numbers from 0 to at least `largest`, about TICKS of them."""
    rough = largest / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _linear(largest: float, start: float, end: float) -> Scale:
    return lambda value: start + value / largest * (end - start)


def _logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    span = math.log(high / low) or 1.0
    return lambda value: start + math.log(max(value, low) / low) / span * (end - start)


def _frame(labels: Labels, marks: Sequence[float], height: Scale) -> list[str]:
    """Return the title, names of the axes, and a horizontal rule at every mark."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    grey: dict[str, Any] = {"text_anchor": "middle", "fill": FAINT}
    parts = [
        text(LEFT, 24, labels.title, 15, font_weight="bold"),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, labels.x, **grey),
        text(16, middle, labels.y, **grey, transform=f"rotate(-90 16 {middle:.1f})"),
    ]
    for mark in marks:
        y = height(mark)
        parts.append(polyline([(LEFT, y), (WIDTH - RIGHT, y)], RULE, 1))
        parts.append(text(LEFT - 8, y + 4, f"{mark:g}", 11, text_anchor="end", fill=FAINT))
    return parts


def _legend(index: int, name: str, colour: str, dashed: bool) -> list[str]:
    x, y = WIDTH - RIGHT + 16, TOP + 8 + 20 * index
    return [polyline([(x, y), (x + 22, y)], colour, 3, dashed), text(x + 28, y + 4, name)]


def _document(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" fill="{INK}">'
    )
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{PAPER}"/>'
    return "\n".join([head, paper, *parts, "</svg>"]) + "\n"
