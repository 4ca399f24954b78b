"""The loss curve: in the terminal always, as a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

WIDTH = 64
HEIGHT = 10


def smooth(values: Sequence[float], count: int) -> list[float]:
    """The means of `count` equal stretches of `values`, or `values` if they are fewer."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


def text_curve(values: Sequence[float], last_step: int) -> str:
    """A curve of plain characters, WIDTH columns by HEIGHT rows, with its axes."""
    points = smooth(values, WIDTH)
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    rows = [round((high - point) / span * (HEIGHT - 1)) for point in points]
    lines = []
    for row in range(HEIGHT):
        label = f"{high - span * row / (HEIGHT - 1):6.2f}" if row in (0, HEIGHT - 1) else " " * 6
        lines.append(f"{label} |{''.join('*' if at == row else ' ' for at in rows)}".rstrip())
    lines.append(" " * 7 + "+" + "-" * len(points))
    lines.append(" " * 8 + "1" + f"step {last_step}".rjust(len(points) - 1))
    return "\n".join(lines)


def save_picture(steps: Sequence[int], losses: Sequence[float], path: Path) -> bool:
    """Draws the curve into a PNG file; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="GPT trained with FastDDP")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
