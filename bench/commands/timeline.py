"""What recording a timeline costs: the training step with it and without it.

    python -m bench timeline --json out/timeline.json

One wrapped model trains in short bursts that alternate between "off", "on" and "off again", so that
all three share buffers and drift alike; only the switch differs. "off again" against "off" is the
noise that a ratio of "on" has to be seen against.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.measure import benchmark as b
from examples.common.ranks import Group
from examples.common.rounds import over, time_lanes
from examples.common.text import Spread
from examples.common.training import Lane, make_lane
from examples.common.variants import OURS, VARIANTS
from fastsync.build import extension

MODES = ("off", "on", "off again")
CAPACITY = 1 << 15  # marks


@dataclass
class Switched(Lane):
    """Records its steps, or does not; lanes of one model."""

    timeline: Any = None

    def forward(self) -> Tensor:
        self.model._engine.core.set_timeline(self.timeline)
        return super().forward()


def row(name: str, group: Group, args: argparse.Namespace) -> tuple[str, ...]:
    """Times the three modes of a model in turn."""
    lane = make_lane(b.workload(name, args), VARIANTS[OURS], group, None)
    timeline = extension.load().Timeline(CAPACITY, str(group.device))
    recorders = dict.fromkeys(MODES) | {"on": timeline}
    lanes: dict[str, Lane] = {m: Switched(**vars(lane), timeline=t) for m, t in recorders.items()}
    found = time_lanes(lanes, group, b.settings_of(args))
    steps = {mode: measured.seconds for mode, measured in found.items()}
    marks = (len(timeline.events()) + timeline.dropped()) / lanes["on"].position

    def percent(mode: str) -> str:
        ratio = Spread.of(over(steps[mode], steps["off"]))
        return f"{100 * (ratio.median - 1):+.2f} ± {100 * ratio.margin(args.rounds):.2f} %"

    step = f"{1e3 * Spread.of(steps['off']).median:.2f} ms"
    return name, step, percent("on"), percent("off again"), f"{marks:.0f}"


@b.benchmark(b.models("small"), b.SCALE, b.RANKS, b.rounds(400), b.steps(4), b.warmup(5))
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    title = (
        "what recording adds to a step, in the same round; off again: the noise of that; median of "
        f"{args.rounds} rounds ± half its 95 % interval"
    )
    headers = ("model", "step, off", "recording", "off again", "marks per step")
    yield b.table(title, headers, [row(name, group, args) for name in args.models])
