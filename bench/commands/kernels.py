"""Bandwidth of pack, unpack and codecs, beside torch's operations, against this machine's copies.

    python -m bench kernels --models gpt2,resnet50 --json out/kernels.json

A kernel gathers the gradients of a model into one flat buffer (pack) or scatters a buffer (unpack);
on the way it multiplies by 1/N and casts. A codec's kernels gather gradients into a coded buffer
(encode), sum two coded buffers and code the sum (reduce), and scatter what a coded buffer stands
for (decode); top-k's finds the largest elements (select). Every way to do that is checked, against
the same thing done in fp64 or the format's bound, then timed, all of them in turn. GB/s counts each
element once read and once written, in the format that it has there, however often a method touches
it; the ceiling is a plain copy of as many bytes between two buffers of this machine's memory, and
`of ceiling` is the share of its bandwidth in the same round. On a GPU the times are those of events
on its stream.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict

import torch

from bench.measure import benchmark as b
from bench.measure.codecs import CODEC_CASES, CodecCase
from bench.measure.gpu import stopwatch
from bench.measure.transfers import CASES, Case, Task, Way, shapes_of
from bench.report.tables import CEILING, Point, point
from examples.common.ranks import Group, UsageError, argument
from examples.common.rounds import in_turn, over
from examples.common.text import Progress, Spread

KIND = "kernels"
SHORTEST = 2e-3  # seconds that a timed stretch takes at least, by repetition
MOST_REPETITIONS = 1000
EVERY: tuple[Case | CodecCase, ...] = (*CASES, *CODEC_CASES)
NAMED = b.names("case", [name for case in EVERY for name in dict.fromkeys((case.kind, case.name))])


def time_ways(ways: dict[str, Way], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each way, in every round."""

    def seconds(way: Way, times: int) -> float:
        watch = stopwatch(device)
        for _ in range(times):
            way()
        return watch() / times

    counts = {}
    for name, way in ways.items():
        way()
        once = max(seconds(way, 1), 1e-9)
        counts[name] = min(MOST_REPETITIONS, max(1, round(SHORTEST / once)))
    return in_turn(ways, lambda name: seconds(ways[name], counts[name]), rounds)


def measure(of: tuple[str, str], task: Task, device: torch.device, rounds: int) -> list[Point]:
    """Checks and times every method of one case, which `of` names with its model.

    Returns:
        A point per method; `time` in seconds, `gbps` in 1e9 bytes per second, `moved` in bytes.

    Raises:
        CheckFailed: a method's result is not that of the reference.
    """
    for name, way in task.ways.items():
        task.check(name, way)
    source = torch.empty(task.moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.zeros_like(source)
    times = time_ways({CEILING: lambda: target.copy_(source), **task.ways}, device, rounds)
    found = []
    for name, seconds in times.items():
        share = asdict(Spread.of(over(seconds, times[CEILING])))
        gbps = task.moved / Spread.of(seconds).median * 1e-9
        found.append(point((*of, name), seconds, moved=task.moved, gbps=gbps, ratio=share))
    return found


@b.benchmark(
    b.models("small,resnet50,wide"),
    argument("--scale", "share of the models' parameters", 1.0, type=b.positive),
    argument("--cases", "all, kinds (pack, unpack, encode...) or names", "all", type=NAMED),
    b.rounds(11),
    argument("--device", "where the kernels run", "cpu", choices=("cpu", "cuda")),
    kind=KIND,
    jobs=b.one_process,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """In one process, model by model."""
    progress, device = Progress(group), torch.device(args.device)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU here")
    for name in args.models:
        workload, found = b.workload(name, args), []
        for case in (c for c in EVERY if {c.kind, c.name} & set(args.cases)):
            progress.show(f"{name}: {case.name}")
            task = case.task(workload, device)
            found += measure((workload.name, case.name), task, device, args.rounds)
        shapes = shapes_of(workload)
        size = f"{len(shapes)} gradients, {sum(map(math.prod, shapes)) / 1e6:.1f} M elements"
        yield b.points(f"{name}: {size}", found, KIND)
