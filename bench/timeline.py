"""What recording a timeline costs: the training step with it and without it.

    python -m bench.timeline --json bench/results/timeline.json

One wrapped model trains in short bursts that alternate between "off", "on" and "off again", so that
all three share buffers and drift alike; only the switch differs. "off again" against "off" is the
noise that a ratio of "on" has to be seen against.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from bench import cli
from bench.harness import Progress, burst, no_meter
from bench.launch import Group, launch
from bench.models import WORKLOADS, Workload
from bench.record import add_json_argument, publish
from bench.stats import Spread, quantile
from bench.training import Lane, make_batches, make_lane
from bench.wrappers import VARIANTS
from fastsync.build import extension

MODES = ("off", "on", "off again")
CAPACITY = 1 << 15


@dataclass(frozen=True)
class Overhead:
    """One model's result.

    Attributes:
        step: seconds without recording.
        on, off_again: ratios to "off" in the same round.
        marks: recorded per step by each rank.
    """

    step: Spread
    on: Spread
    off_again: Spread
    marks: float


def compare(workload: Workload, group: Group, args: argparse.Namespace) -> Overhead:
    """Times the three modes in turn, each round beginning with another one."""
    lane = make_lane(workload, VARIANTS["fastsync"], group, None, make_batches(workload, group))
    model: Any = lane.model
    core = model._engine.core
    timeline = extension.load().Timeline(CAPACITY, str(group.device))
    burst(lane, group, args.warmup, no_meter)
    rounds: dict[str, list[float]] = {mode: [] for mode in MODES}
    progress = Progress(group)
    for index in range(args.rounds):
        times = torch.zeros(len(MODES), args.steps, dtype=torch.float64)
        for place in range(len(MODES)):
            which = (index + place) % len(MODES)
            core.set_timeline(timeline if MODES[which] == "on" else None)
            times[which] = torch.tensor(burst(lane, group, args.steps, no_meter)[1:])
        for mode, row in zip(MODES, group.max(times).tolist(), strict=True):
            rounds[mode].append(quantile(row, 0.5))
        progress.show(f"{workload.name}: round {index + 1}/{args.rounds}")
    core.set_timeline(None)
    progress.clear()
    return _overhead(rounds, timeline, lane, args.rounds * (args.steps + 1))


def _overhead(rounds: dict[str, list[float]], timeline: Any, lane: Lane, steps: int) -> Overhead:
    off = rounds["off"]
    ratios = {
        mode: Spread.of([a / b for a, b in zip(rounds[mode], off, strict=True)]) for mode in MODES
    }
    marks = (len(timeline.events()) + timeline.dropped()) / steps
    return Overhead(Spread.of(off), ratios["on"], ratios["off again"], marks)


def _row(name: str, result: Overhead, rounds: int) -> tuple[str, ...]:
    def percent(ratio: Spread) -> str:
        return f"{100 * (ratio.median - 1):+.2f} ± {100 * ratio.margin(rounds):.2f} %"

    step = f"{1e3 * result.step.median:.2f} ms"
    return name, step, percent(result.on), percent(result.off_again), f"{result.marks:.0f}"


def run(args: argparse.Namespace, group: Group) -> int:
    results = [(name, compare(WORKLOADS[name](), group, args)) for name in cli.models(args.models)]
    rows = [_row(*result, args.rounds) for result in results]
    title = (
        "what recording adds to a step, in the same round; off again: the noise of that; median of "
        f"{args.rounds} rounds ± half its 95 % interval"
    )
    headers = ("model", "step, off", "recording", "off again", "marks per step")
    publish(title, headers, rows, group, args)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default="small", help=f"of {', '.join(WORKLOADS)}")
    add("--ranks", type=int, default=2, help="processes to start; torchrun's wins (default: 2)")
    add("--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)")
    add("--rounds", type=int, default=400, help="bursts of each mode (default: 400)")
    add("--steps", type=int, default=4, help="timed steps in a burst (default: 4)")
    add("--warmup", type=int, default=5, help="steps before the first round (default: 5)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add_json_argument(parser)
    args = parser.parse_args()
    return cli.guarded(lambda: launch(lambda group: run(args, group), args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
