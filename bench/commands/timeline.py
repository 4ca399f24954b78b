"""What recording a timeline costs: the training step with it and without it.

    python -m bench timeline --json out/timeline.json

One wrapped model trains in short bursts that alternate between "off", "on" and "off again", so that
all three share buffers and drift alike; only the switch differs. "off again" against "off" is the
noise that a ratio of "on" has to be seen against.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from bench.measure import benchmark as b
from bench.models import WORKLOADS
from examples.common.ranks import Group
from examples.common.rounds import burst, in_turn, over, slowest
from examples.common.text import Progress, Spread, quantile
from examples.common.training import make_lane
from examples.common.variants import OURS, VARIANTS
from fastsync.build import extension

MODES = ("off", "on", "off again")
CAPACITY = 1 << 15  # marks


def row(name: str, group: Group, args: argparse.Namespace) -> tuple[str, ...]:
    """Times the three modes of a model in turn."""
    lane, progress = make_lane(WORKLOADS[name](), VARIANTS[OURS], group, None), Progress(group)
    model: Any = lane.model
    core, timeline = model._engine.core, extension.load().Timeline(CAPACITY, str(group.device))
    burst(lane, group, args.warmup)

    def once(mode: str) -> list[float]:
        core.set_timeline(timeline if mode == "on" else None)
        return burst(lane, group, args.steps)

    def show(index: int) -> None:
        progress.show(f"{name}: round {index + 1}/{args.rounds}")

    found = slowest(in_turn(MODES, once, args.rounds, show), group)
    core.set_timeline(None)
    steps = {mode: [quantile(times[1:], 0.5) for times in found[mode]] for mode in MODES}
    marks = (len(timeline.events()) + timeline.dropped()) / (args.rounds * (args.steps + 1))

    def percent(mode: str) -> str:
        ratio = Spread.of(over(steps[mode], steps["off"]))
        return f"{100 * (ratio.median - 1):+.2f} ± {100 * ratio.margin(args.rounds):.2f} %"

    step = f"{1e3 * Spread.of(steps['off']).median:.2f} ms"
    return name, step, percent("on"), percent("off again"), f"{marks:.0f}"


@b.benchmark(b.models("small"), b.RANKS, b.rounds(400), b.steps(4), b.warmup(5))
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    title = (
        "what recording adds to a step, in the same round; off again: the noise of that; median of "
        f"{args.rounds} rounds ± half its 95 % interval"
    )
    headers = ("model", "step, off", "recording", "off again", "marks per step")
    yield b.table(title, headers, [row(name, group, args) for name in args.models], args)
