"""Draws the figures of the documentation, as SVG text: python docs/make_figures.py

With --check nothing is written; the exit code is 1 where a committed figure is not what this file
draws.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 940, 424
INK, FAINT, PAPER, BOX = "#24292f", "#6e7781", "#ffffff", "#f6f8fa"
COLOURS = ("#a5d6ff", "#ffd8a8", "#b7e4c7")
GREY = "#d0d7de"


def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str = INK) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" fill="{fill}" stroke="{stroke}"/>'
    )


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, **more: str) -> str:
    style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{style}>{escape(words)}</text>'


def arrow(start: tuple[float, float], end: tuple[float, float], dashed: bool = False) -> str:
    """A line with a tip at its end, which is drawn: not every renderer knows markers."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    base_x, base_y = x1 - 9 * dx, y1 - 9 * dy
    corners = ((x1, y1), (base_x - 4 * dy, base_y + 4 * dx), (base_x + 4 * dy, base_y - 4 * dx))
    tip = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{base_x:.1f}" y2="{base_y:.1f}" stroke="{INK}" '
        f'stroke-width="1.4"{dash}/><polygon points="{tip}" fill="{INK}"/>'
    )


def step(number: int, x: float, y: float, title: str, *lines: str) -> list[str]:
    """A numbered caption whose circle is centred on (x, y)."""
    parts = [
        f'<circle cx="{x}" cy="{y}" r="10" fill="{INK}"/>',
        text(x, y + 4.5, str(number), 12, PAPER, text_anchor="middle", font_weight="bold"),
        text(x + 17, y + 4.5, title, 13, font_weight="bold"),
    ]
    return parts + [text(x + 17, y + 21 + 15 * i, line, 12, FAINT) for i, line in enumerate(lines)]


def flat_buffer(x: float, y: float) -> tuple[list[str], list[float]]:
    """A flat buffer of three slots; returns its drawing and the centre of each slot."""
    parts, centres, at = [], [], x
    cells = [("a", 70, COLOURS[0]), ("", 8, GREY), ("b", 44, COLOURS[1]), ("", 8, GREY)]
    cells += [("c", 56, COLOURS[2]), ("", 8, GREY), ("flags", 48, BOX), ("vote", 36, BOX)]
    for label, width, colour in cells:
        parts.append(rect(at, y, width, 34, colour))
        if label:
            small = len(label) > 1
            parts.append(
                text(at + width / 2, y + 22, label, 11 if small else 14, text_anchor="middle")
            )
        if label in ("a", "b", "c"):
            centres.append(at + width / 2)
        at += width
    return parts, centres


def scattered(x: float, y: float) -> tuple[list[str], list[float]]:
    """Three gradients as autograd leaves them; returns their drawing and their centres."""
    parts, centres = [], []
    for name, offset, width, colour in zip("abc", (0, 96, 166), (70, 44, 56), COLOURS, strict=True):
        parts += [
            rect(x + offset, y, width, 34, colour),
            text(x + offset + width / 2, y + 22, name, 14, text_anchor="middle"),
        ]
        centres.append(x + offset + width / 2)
    return parts, centres


def gradient_way() -> str:
    """How gradients get from autograd into `param.grad` as averages."""
    parts: list[str] = []
    left, right = 40, 600
    parts += step(
        1,
        30,
        26,
        "hook",
        "autograd has accumulated a gradient;",
        "its post hook, in C++ without the GIL,",
        "marks the slot",
    )
    parts += step(
        2,
        325,
        26,
        "bucket",
        "the last slot completes it; buckets leave",
        "strictly in plan order, on every rank",
    )
    parts += step(
        6,
        640,
        26,
        "view",
        "param.grad is a view of the flat buffer:",
        "nothing is copied back. Sent in another dtype,",
        "one unpack kernel writes it instead",
    )
    above, tops = scattered(left, 112)
    below, slots = flat_buffer(left, 236)
    parts += above + below
    parts += [arrow((a, 147), (b, 234)) for a, b in zip(tops, slots, strict=True)]
    parts += step(
        3,
        330,
        168,
        "pack",
        "one kernel for the bucket: gather,",
        "multiply by 1/N, cast to the dtype sent",
    )
    parts.append(arrow((left + 282, 253), (right - 6, 253)))
    parts += step(
        4, 352, 276, "all-reduce", "through the c10d process group,", "while backward continues"
    )
    reduced, slots = flat_buffer(right, 236)
    names, tops = scattered(right, 112)
    parts += reduced + names
    parts += [arrow((a, 147), (b, 234), dashed=True) for a, b in zip(tops, slots, strict=True)]
    parts += step(
        5,
        610,
        292,
        "end of backward",
        "the final callback sends what is left and waits;",
        "only a rank that missed a gradient",
        "reads the flags",
    )
    parts.append(text(left, 286, "flat buffer of this rank", 12, FAINT))
    parts.append(text(left + 330, 245, "N ranks, summed", 12, FAINT))
    parts.append(text(left + 238, 133, "gradients", 12, FAINT))
    parts.append(text(right + 238, 133, "param.grad", 12, FAINT))
    parts += [
        rect(30, 362, WIDTH - 60, 46, BOX, GREY),
        text(
            44,
            381,
            "flags: one element per slot, 1 where this rank produced a gradient; "
            "their sum tells for free whether any rank did.",
            12,
        ),
        text(
            44,
            398,
            "vote: this rank asks for a new plan. "
            "Grey: padding; slots start at multiples of 16 elements.",
            12,
        ),
    ]
    return document(parts)


MICRO = (((0, 3), (1, 5)), ((0, 4), (1, 0)))  # micro-batches of each rank: number, tokens


def means() -> str:
    """How the weights of micro-batches become the factor of gradients."""
    parts: list[str] = []
    left, each, sums = 96, 132, 432
    for rank, (micros, y) in enumerate(zip(MICRO, (66, 156), strict=True)):
        parts.append(text(30, y + 22, f"rank {rank}", 13, font_weight="bold"))
        for number, tokens in micros:
            x = left + number * (each + 12)
            parts += [
                rect(x, y, each, 34, COLOURS[number]),
                text(x + each / 2, y + 22, f"backward, {tokens} tokens", 12, text_anchor="middle"),
            ]
        total = sum(tokens for _, tokens in micros)
        parts += [
            arrow((left + 2 * each + 14, y + 17), (sums - 34, 128)),
            text(left + 2 * each + 36, y + (10 if rank == 0 else 40), f"w = {total}", 12, FAINT),
        ]
    parts += [
        f'<circle cx="{sums}" cy="128" r="30" fill="{COLOURS[2]}" stroke="{INK}"/>',
        text(sums, 133, "W = 12", 13, text_anchor="middle"),
        arrow((sums + 32, 128), (560, 128)),
        rect(562, 104, 130, 48, BOX),
        text(627, 124, "pack", 13, text_anchor="middle", font_weight="bold"),
        text(627, 142, "gradient / 12", 12, text_anchor="middle"),
        arrow((694, 128), (764, 128)),
        rect(766, 104, 146, 48, BOX),
        text(839, 124, "all-reduce", 13, text_anchor="middle", font_weight="bold"),
        text(839, 142, "mean of 12 tokens", 12, text_anchor="middle"),
    ]
    parts += step(1, 106, 30, "add_weight", "each micro-batch, before its backward")
    parts += step(2, 400, 30, "the weights' sum", "starts with the last backward")
    parts += step(3, 640, 30, "scale once", "where 1/N would be, before", "the first bucket leaves")
    return document(parts, 212)


def groups() -> str:
    """Which ranks average what: two experts, of which each has two replicas."""
    parts: list[str] = []
    columns = [(120 + 190 * rank, rank) for rank in range(4)]
    for x, rank in columns:
        expert = rank % 2
        parts += [
            rect(x, 14, 150, 128, PAPER),
            text(x + 75, 34, f"rank {rank}", 13, text_anchor="middle", font_weight="bold"),
            rect(x + 15, 46, 120, 34, COLOURS[0]),
            text(x + 75, 68, "attention, router", 12, text_anchor="middle"),
            rect(x + 15, 94, 120, 34, COLOURS[1 + expert]),
            text(x + 75, 116, f"expert {'AB'[expert]}", 13, text_anchor="middle"),
        ]
    for left in (0, 2):  # tokens travel between the ranks of a replica
        x = columns[left][0]
        parts += [
            arrow((x + 170, 111), (x + 137 + 66, 111)),
            arrow((x + 170, 111), (x + 137, 111)),
            text(x + 170, 104, "tokens", 11, FAINT, text_anchor="middle"),
        ]
    rows = (
        (172, 0, (0, 1, 2, 3), "process_group: sum of 4 / 4"),
        (212, 1, (0, 2), "Group(ranks 0 and 2, divisor=4): sum of 2 / 4"),
        (252, 2, (1, 3), "Group(ranks 1 and 3, divisor=4): sum of 2 / 4"),
    )
    for y, colour, ranks, words in rows:
        first, last = columns[ranks[0]][0] + 75, columns[ranks[-1]][0] + 75
        parts += [
            f'<line x1="{first}" y1="{y}" x2="{last}" y2="{y}" stroke="{INK}" stroke-width="1.4"/>',
            text((first + last) / 2, y - 6, words, 12, FAINT, text_anchor="middle"),
        ]
        parts += [
            f'<circle cx="{columns[rank][0] + 75}" cy="{y}" r="8" fill="{COLOURS[colour]}" '
            f'stroke="{INK}"/>'
            for rank in ranks
        ]
    return document(parts, 274)


def document(parts: list[str], height: int = HEIGHT) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">'
    )
    paper = f'<rect width="{WIDTH}" height="{height}" rx="6" fill="{PAPER}"/>'
    return "\n".join([head, paper, *parts, "</svg>"]) + "\n"


FIGURES: dict[str, Callable[[], str]] = {
    "gradient-way.svg": gradient_way,
    "groups.svg": groups,
    "means.svg": means,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed figures")
    check = parser.parse_args().check
    stale = 0
    for name, draw in FIGURES.items():
        path, drawing = HERE / name, draw()
        if not check:
            path.write_text(drawing, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawing:
            print(f"{name} is not what docs/make_figures.py draws: run it", file=sys.stderr)
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
