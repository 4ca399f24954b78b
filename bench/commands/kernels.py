"""Bandwidth of pack, unpack and codecs, beside torch's operations, against this machine's copies.

    python -m bench kernels --models gpt2,resnet50 --json out/kernels.json

A kernel gathers the gradients of a model into one flat buffer (pack) or scatters a buffer (unpack);
on the way it multiplies by 1/N and casts. A codec's kernels gather gradients into a coded buffer
(encode), sum two coded buffers and code the sum (reduce), and scatter what a coded buffer stands
for (decode); top-k's finds the largest elements (select). Every way to do that is checked, against
the same thing done in fp64 or the format's bound, then timed, all of them in turn. GB/s counts each
element once read and once written, in the format that it has there, however often a method touches
it; the ceiling is a plain copy of as many bytes between two buffers of this machine's memory, and
`of ceiling` is the share of its bandwidth in the same round.

On a GPU the times are its own: it sleeps while the host hands it a stretch of calls. What a call
takes the host is a figure by itself. Calls take turns on so many copies of their data that its
second-level cache holds nothing of the next.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter

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
AHEAD = 2  # times what the host needs: so long a GPU sleeps
CACHES, MOST_COPIES = 3, 16  # of a GPU's cache, that data should fill; of data
EVERY: tuple[Case | CodecCase, ...] = (*CASES, *CODEC_CASES)
NAMED = b.names("case", [name for case in EVERY for name in dict.fromkeys((case.kind, case.name))])


def time_ways(
    ways: dict[str, Way], device: torch.device, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of a call of each way in every round, and those that it takes the host."""

    def seconds(way: Way, times: int, ahead: float = 0.0) -> tuple[float, float]:
        watch, start = stopwatch(device, ahead), perf_counter()
        for _ in range(times):
            way()
        host = perf_counter() - start
        return watch() / times, host / times

    counts, aheads = {}, {}
    for name, way in ways.items():
        way()
        once, host = seconds(way, 1)
        counts[name] = min(MOST_REPETITIONS, max(1, round(SHORTEST / max(once, 1e-9))))
        aheads[name] = AHEAD * host * counts[name]
    return in_turn(ways, lambda name: seconds(ways[name], counts[name], aheads[name]), rounds)


def rotated(make: Callable[[], Task], device: torch.device) -> tuple[dict[str, Way], int]:
    """Return the ways of a task that `make` makes, checked, and of a copy as large; each call of a
    way is on other memory than the one before where a GPU would find that in its cache. And bytes
    moved.

    Raises:
        CheckFailed: a method's result is not that of the reference.
    """
    tasks = [make()]
    for name, way in tasks[0].ways.items():
        tasks[0].check(name, way)
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        tasks += [make() for _ in range(min(MOST_COPIES, CACHES * cache // tasks[0].moved))]

    def turns(name: str) -> Way:
        ways = cycle([task.ways[name] for task in tasks])
        return lambda: next(ways)()

    copies, moved = cycle([copy_of(t.moved // 2, device) for t in tasks]), tasks[0].moved
    ours = {name: turns(name) for name in tasks[0].ways}
    return {CEILING: lambda: next(copies)(), **ours}, moved


def copy_of(nbytes: int, device: torch.device) -> Way:
    """Copy so many bytes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def measure(
    of: tuple[str, str], ways: dict[str, Way], moved: int, device: torch.device, rounds: int
) -> list[Point]:
    """Time every method of one case, which `of` names with its model.

    Returns:
        A point per method; `time` in seconds, `gbps` in 1e9 bytes per second, `moved` in bytes;
        on a GPU `host` in seconds.
    """
    times = time_ways(ways, device, rounds)
    ceiling, found = [seconds for seconds, _ in times[CEILING]], []
    for name, pairs in times.items():
        seconds, hosts = ([pair[i] for pair in pairs] for i in range(2))
        share, gbps = asdict(Spread.of(over(seconds, ceiling))), moved / median(seconds) * 1e-9
        more = {"host": asdict(Spread.of(hosts))} if device.type == "cuda" else {}
        found.append(point((*of, name), seconds, moved=moved, gbps=gbps, ratio=share, **more))
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
            ways, moved = rotated(partial(case.task, workload, device), device)
            found += measure((workload.name, case.name), ways, moved, device, args.rounds)
        shapes = shapes_of(workload)
        size = f"{len(shapes)} gradients, {sum(map(math.prod, shapes)) / 1e6:.1f} M elements"
        yield b.points(f"{name}: {size}", found, KIND)
