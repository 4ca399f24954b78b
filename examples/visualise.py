"""Shows one step of gradient synchronisation: gradients before and after, buckets, strategies.

    python -m examples.visualise --ranks 2 --page out/synchronisation.html

Every rank computes its own gradients; five strategies average them: one message per parameter,
buckets after backward, buckets that overlap with backward, torch's DDP and fastsync's FastDDP. The
terminal shows strips of gradients, buckets, and when each message was under way; --page writes the
same as one HTML file that needs no network. Exits with 1 where a strategy does not leave the
average of all ranks on every rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.common.ranks import Group, argument, run_example
from examples.common.text import render
from examples.synchronisation import HEADERS, Picture, Run, take_picture
from examples.visualise_page import page

WIDTH = 64
STRIP = 16
LEVELS = "▁▂▃▄▅▆▇█"
RANKS_SHOWN = 3
ROUNDING = 1e-6  # accepted, of the largest average
MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def strip(values: tuple[float, ...], largest: float) -> str:
    """STRIP of the values as bars; the middle level is zero."""
    picked = [values[i * len(values) // STRIP] for i in range(STRIP)]
    top = len(LEVELS) - 1
    return "".join(LEVELS[round((v / largest + 1) / 2 * top)] for v in picked)


def gradient_table(picture: Picture) -> str:
    buckets, rows = picture.bucket_of("fastsync"), []
    for p in picture.parameters:
        shown = (*p.before[:RANKS_SHOWN], p.after[0])
        largest = max(abs(v) for values in shown for v in values) or 1.0
        strips = (strip(values, largest) for values in shown)
        shape, mark = "x".join(str(n) for n in p.shape), MARKS[buckets[p.name] % len(MARKS)]
        rows.append((p.name, shape, *strips, mark))
    ranks = (f"rank {rank} before" for rank in range(min(picture.world, RANKS_SHOWN)))
    return render(("parameter", "shape", *ranks, "after, on all", "bucket"), rows)


def lanes(run: Run, longest: float) -> list[str]:
    """Backward, and below it each message by its number, on a common scale of time."""

    def place(seconds: float) -> int:
        return min(WIDTH - 1, int(seconds / longest * WIDTH))

    messages = [" "] * WIDTH
    for number, message in enumerate(run.messages):
        for at in range(place(message.start), place(message.end) + 1):
            messages[at] = MARKS[number % len(MARKS)]
    return ["=" * (place(run.backward) + 1), "".join(messages).rstrip()]


def averages(picture: Picture) -> bool:
    """Whether every strategy left averages, and FastDDP the same ones on every rank."""
    alike = all(set(p.after) == {p.after[0]} for p in picture.parameters)
    return alike and all(run.error <= ROUNDING for run in picture.runs)


def show(picture: Picture) -> None:
    print(f"\n  gradients, {STRIP} elements of each: the middle level is zero\n")
    print(gradient_table(picture))
    print("\n  one backward (=) and its messages, by number\n")
    longest = max(run.total for run in picture.runs)
    for run in picture.runs:
        backward, messages = lanes(run, longest)
        print(f"  {run.strategy:<14}|{backward}\n  {'':<14}|{messages}")
    scale = f"{1e3 * longest:.1f} ms".rjust(WIDTH - 1)
    print(f"  {'':<14}+{'-' * WIDTH}\n  {'':<14}0{scale}\n")
    print(render(HEADERS, [run.cells() for run in picture.runs]))
    ranks = f"{picture.world} ranks over {picture.transport}"
    print(f"\n  {ranks}; a single step, so times are a look,")
    print("  not a measurement; exposed: after the last gradient; error: from the fp64 average")


def run(args: argparse.Namespace, group: Group) -> int:
    picture = take_picture(group)
    good = averages(picture)
    if group.is_main:
        show(picture)
        if args.page:
            args.page.parent.mkdir(parents=True, exist_ok=True)
            args.page.write_text(page(picture), encoding="utf-8")
            print(f"\n  page: {args.page}")
        if not good:
            print("\n  a strategy did NOT leave the average of all ranks on every rank")
    return 0 if good else 1


def main() -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for terminals without bars in their encoding
    page_argument = argument("--page", "write an HTML page to this file", type=Path)
    return run_example("visualise", __doc__, run, page_argument)


if __name__ == "__main__":
    raise SystemExit(main())
