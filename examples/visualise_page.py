"""The picture of examples/visualise.py as one HTML page: inline SVG, no script, no network."""

from __future__ import annotations

from html import escape

from examples.common.svg import line, rect, text
from examples.synchronisation import HEADERS, Message, Picture, Run

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948")
POSITIVE, NEGATIVE = (196, 60, 40), (38, 96, 180)
INK, FAINT, RULE, SHADE = "#24292f", "#6e7781", "#d0d7de", "#fde8e4"
CELL, ROW, BETWEEN = 5, 22, 4.0
NAME_WIDTH, GAP = 150, 16
TIME_WIDTH, LANE = 900, 14
RANKS_SHOWN = 4

STYLE = """
body { font: 15px/1.5 Helvetica, Arial, sans-serif; color: #24292f; max-width: 1100px;
       margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
p { max-width: 50em; } svg { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; } td, th { padding: .25em .9em; text-align: right;
       border-bottom: 1px solid #d0d7de; } td:first-child, th:first-child { text-align: left; }
"""


def svg(width: float, height: float, parts: list[str], label: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    font = f'font-family="Helvetica, Arial, sans-serif" fill="{INK}"'
    return f'<svg {size} role="img" aria-label="{label}" {font}>{"".join(parts)}</svg>'


def shade(value: float, largest: float) -> str:
    """White at zero, red towards the largest value, blue towards its negative."""
    strength = min(1.0, abs(value) / largest) ** 0.6  # small values remain visible
    towards = POSITIVE if value > 0 else NEGATIVE
    return "#" + "".join(f"{round(255 + strength * (c - 255)):02x}" for c in towards)


def strip(x: float, y: float, values: tuple[float, ...], largest: float) -> list[str]:
    cells = [
        rect(x + CELL * i, y, CELL, ROW - 8, shade(v, largest), f"{v:.2e}")
        for i, v in enumerate(values)
    ]
    size = f'width="{CELL * len(values)}" height="{ROW - 8}"'
    return [*cells, f'<rect x="{x}" y="{y}" {size} fill="none" stroke="{RULE}"/>']


def gradients_figure(picture: Picture) -> str:
    """A row per parameter; a column per rank before averaging, then one per rank after it, of the
    first RANKS_SHOWN ranks."""
    buckets, ranks = picture.bucket_of("fastsync"), range(min(picture.world, RANKS_SHOWN))
    width = CELL * len(picture.parameters[0].after[0])
    titles = [f"rank {r}, {when}" for when in ("before", "after") for r in ranks]
    columns = [NAME_WIDTH + (width + GAP) * i for i in range(len(titles))]
    parts = [text(x, 14, title, fill=FAINT) for x, title in zip(columns, titles, strict=True)]
    y = 24
    for parameter in picture.parameters:
        colour = COLOURS[buckets[parameter.name] % len(COLOURS)]
        parts += [rect(0, y, 8, ROW - 8, colour), text(14, y + 11, parameter.name)]
        strips = (*parameter.before[:RANKS_SHOWN], *parameter.after[:RANKS_SHOWN])
        largest = max(abs(v) for values in strips for v in values) or 1.0
        for x, values in zip(columns, strips, strict=True):
            parts += strip(x, y, values, largest)
        y += ROW
    return svg(columns[-1] + width + 4, y, parts, "gradients before and after")


def buckets_figure(picture: Picture) -> str:
    """The parameters in the order in which they travel, as wide as their bytes."""
    sizes, parts, y = {p.name: p.size for p in picture.parameters}, list[str](), 4
    for run in picture.runs:
        room = TIME_WIDTH - BETWEEN * len(run.messages)
        scale, x = room / sum(sizes.values()), float(NAME_WIDTH)
        parts.append(text(0, y + 13, run.strategy))
        for number, message in enumerate(run.messages):
            colour = COLOURS[number % len(COLOURS)]
            for name in message.names:
                hover = f"{name}, {sizes[name]:,} bytes, in message {number}"
                width = max(0.6, sizes[name] * scale)
                parts.append(rect(x, y, max(0.6, width - 0.6), 18, colour, hover))
                x += width
            x += BETWEEN
        y += 26
    return svg(NAME_WIDTH + TIME_WIDTH + 30, y + 4, parts, "buckets of every strategy")


def stacked(messages: tuple[Message, ...]) -> list[tuple[int, Message]]:
    """Each message with the first lane that is free when it starts."""
    free: list[float] = []
    placed = []
    for message in messages:
        lane = next((i for i, end in enumerate(free) if end <= message.start), len(free))
        free[lane : lane + 1] = [message.end]
        placed.append((lane, message))
    return placed


def strategy_lanes(run: Run, y: float, scale: float) -> tuple[list[str], float]:
    """Backward, the messages under it, exposed time shaded; and where the next one begins."""
    placed = stacked(run.messages)
    height = LANE * (2 + max(lane for lane, _ in placed))
    x, length = float(NAME_WIDTH), scale * run.backward
    exposed = f"{1e3 * run.exposed:.2f} ms exposed"
    parts = [
        *(text(0, y + 11, run.strategy), text(0, y + 26, exposed, fill=FAINT)),
        rect(x + length, y, scale * run.exposed, height, SHADE, exposed),
        rect(x, y, length, LANE - 3, "#8c959f", f"backward {1e3 * run.backward:.2f} ms"),
    ]
    for number, (lane, message) in enumerate(placed):
        took = f"{1e3 * message.start:.2f} to {1e3 * message.end:.2f} ms"
        hover = f"message {number}, {message.size:,} bytes, {took}: {', '.join(message.names)}"
        long, top = max(1.0, scale * (message.end - message.start)), y + LANE * (lane + 1)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(rect(x + scale * message.start, top, long, LANE - 3, colour, hover))
    return parts, y + max(height, 34) + 14


def time_figure(picture: Picture) -> str:
    longest = max(run.total for run in picture.runs)
    y, parts = 4.0, list[str]()
    for run in picture.runs:
        drawn, y = strategy_lanes(run, y, TIME_WIDTH / longest)
        parts += drawn
    for tick in range(6):
        x, words = NAME_WIDTH + TIME_WIDTH * tick / 5, f"{1e3 * longest * tick / 5:.1f} ms"
        label = text(x, y + 14, words, fill=FAINT, text_anchor="middle")
        parts += [line(x, 0, x, y, RULE, 0.7), label]
    return svg(NAME_WIDTH + TIME_WIDTH + 30, y + 20, parts, "when messages were under way")


def page(picture: Picture) -> str:
    """The whole page."""
    cells = len(picture.parameters[0].after[0])
    head = "".join(f"<th>{cell}</th>" for cell in HEADERS)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in run.cells()) for run in picture.runs)
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>One step of gradient synchronisation</title><style>{STYLE}</style></head><body>
<h1>One step of gradient synchronisation</h1>
<p>{picture.world} ranks over {escape(picture.transport)}. Each rank has other data, so each has
other gradients; afterwards all hold the average. Hover over anything for its numbers.</p>
<h2>Gradients before and after</h2>
<p>{cells} elements of every gradient, evenly spaced: red is positive, blue negative, white zero, on
a scale of each parameter's own. The mark before a name is the colour of its bucket in FastDDP.</p>
{gradients_figure(picture)}
<h2>What travels together</h2>
<p>Every message in the order in which it is sent, its parameters as wide as their bytes.</p>
{buckets_figure(picture)}
<h2>When it travels</h2>
<p>Grey: backward, until its last gradient. Below it the messages, as rank 0's host saw them, in the
colours from above. Shaded: exposed communication, which backward does not hide. A single step: a
look, not a measurement.</p>
{time_figure(picture)}
<h2>In numbers</h2>
{table}
<p>Error: the largest difference from the average computed in fp64, on any rank, relative to the
largest average.</p>
</body></html>
"""
