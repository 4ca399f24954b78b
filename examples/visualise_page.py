"""The picture of examples/visualise.py as one HTML page: inline SVG, no script, no network."""

from __future__ import annotations

from html import escape

from examples.synchronisation import Message, Parameter, Picture, Run

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#edc948")
POSITIVE, NEGATIVE = (196, 60, 40), (38, 96, 180)
INK, FAINT, RULE, SHADE = "#24292f", "#6e7781", "#d0d7de", "#fde8e4"
CELL, ROW = 5, 22
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


def rect(x: float, y: float, w: float, h: float, fill: str, hover: str = "") -> str:
    title = f"<title>{escape(hover)}</title>" if hover else ""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}"'
    return f"{shape}>{title}</rect>" if title else f"{shape}/>"


def text(x: float, y: float, words: str, fill: str = INK, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def svg(width: float, height: float, parts: list[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(label)}" font-family="Helvetica, Arial, sans-serif">'
        + "".join(parts)
        + "</svg>"
    )


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
    width = CELL * len(values)
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{ROW - 8}" fill="none" stroke="{RULE}"/>'
    )
    return [*cells, frame]


def gradients_figure(picture: Picture) -> str:
    """A row per parameter; a column per rank before averaging, then one per rank after it.

    Of the ranks, the first RANKS_SHOWN.
    """
    buckets = picture.bucket_of("fastsync")
    width = CELL * len(picture.parameters[0].after[0])
    ranks = range(min(picture.world, RANKS_SHOWN))
    titles = [f"rank {r}, before" for r in ranks] + [f"rank {r}, after" for r in ranks]
    columns = [NAME_WIDTH + (width + GAP) * i for i in range(len(titles))]
    parts = [text(x, 14, title, FAINT) for x, title in zip(columns, titles, strict=True)]
    for index, parameter in enumerate(picture.parameters):
        y = 24 + ROW * index
        colour = COLOURS[buckets[parameter.name] % len(COLOURS)]
        parts += [rect(0, y, 8, ROW - 8, colour), text(14, y + 11, parameter.name)]
        strips = (*parameter.before[:RANKS_SHOWN], *parameter.after[:RANKS_SHOWN])
        largest = max(abs(v) for values in strips for v in values) or 1.0
        for x, values in zip(columns, strips, strict=True):
            parts += strip(x, y, values, largest)
    height = 24 + ROW * len(picture.parameters)
    return svg(columns[-1] + width + 4, height, parts, "gradients before and after")


def bucket_bar(run: Run, sizes: dict[str, Parameter], y: float) -> list[str]:
    """The parameters in the order in which they travel, as wide as their bytes."""
    total = sum(message.size for message in run.messages)
    scale = (TIME_WIDTH - GAP * 0.25 * len(run.messages)) / total
    parts, x = [text(0, y + 13, run.strategy)], float(NAME_WIDTH)
    for number, message in enumerate(run.messages):
        for name in message.names:
            size = sizes[name].size
            hover = f"{name}, {size:,} bytes, in message {number}"
            colour = COLOURS[number % len(COLOURS)]
            parts.append(rect(x, y, max(0.6, size * scale - 0.6), 18, colour, hover))
            x += max(0.6, size * scale)
        x += GAP * 0.25
    return parts


def buckets_figure(picture: Picture) -> str:
    parameters = {parameter.name: parameter for parameter in picture.parameters}
    parts: list[str] = []
    for index, run in enumerate(picture.runs):
        parts += bucket_bar(run, parameters, 4 + 26 * index)
    height = 8 + 26 * len(picture.runs)
    return svg(NAME_WIDTH + TIME_WIDTH + 30, height, parts, "buckets of every strategy")


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
    height = LANE * (1 + max(lane for lane, _ in placed) + 1)
    x = float(NAME_WIDTH)
    exposed = f"{1e3 * run.exposed:.2f} ms exposed"
    parts = [
        text(0, y + 11, run.strategy),
        text(0, y + 26, exposed, FAINT),
        rect(x + scale * run.backward, y, scale * run.exposed, height, SHADE, exposed),
        rect(
            x, y, scale * run.backward, LANE - 3, "#8c959f", f"backward {1e3 * run.backward:.2f} ms"
        ),
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
    scale, y, parts = TIME_WIDTH / longest, 4.0, []
    for run in picture.runs:
        drawn, y = strategy_lanes(run, y, scale)
        parts += drawn
    for tick in range(6):
        x = NAME_WIDTH + TIME_WIDTH * tick / 5
        parts.append(
            f'<line x1="{x}" y1="0" x2="{x}" y2="{y}" stroke="{RULE}" stroke-width="0.7"/>'
        )
        parts.append(text(x, y + 14, f"{1e3 * longest * tick / 5:.1f} ms", FAINT, "middle"))
    return svg(NAME_WIDTH + TIME_WIDTH + 30, y + 20, parts, "when messages were under way")


def table(picture: Picture) -> str:
    headers = ("strategy", "messages", "MB", "step ms", "exposed ms", "error")
    rows = []
    for run in picture.runs:
        size = sum(message.size for message in run.messages)
        times = (f"{1e3 * run.total:.2f}", f"{1e3 * run.exposed:.2f}")
        rows.append(
            (run.strategy, str(len(run.messages)), f"{size / 1e6:.2f}", *times, f"{run.error:.0e}")
        )
    head = "".join(f"<th>{cell}</th>" for cell in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def page(picture: Picture) -> str:
    """The whole page."""
    cells = len(picture.parameters[0].after[0])
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
{table(picture)}
<p>Error: the largest difference from the average computed in fp64, on any rank, relative to the
largest average.</p>
</body></html>
"""
