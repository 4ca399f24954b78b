"""A whole training step in a CUDA graph, beside the same step without one.

    python -m bench graphs --models small --json out/graphs.json

A step is zero_grad, forward, backward and AdamW's step. Every variant trains on a stream of its
own; after WARMUP steps, as many as torch asks for before DDP is captured, a second copy of it
captures one more into a graph. Both then go on from the same weights, which is checked first, and
are timed in turn. Ratios are to the variant's own step without a graph, in the same round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from bench.measure import benchmark as b
from bench.measure.gpu import stopwatch
from bench.report.tables import point
from examples.common.check import ROUNDING
from examples.common.ranks import CheckFailed, Group, UsageError
from examples.common.rounds import in_turn, over, slowest
from examples.common.text import Progress, Spread
from examples.common.training import Lane, Workload, make_batches
from examples.common.variants import FLOOR, OURS, Variant, select

KIND = "graphs"
WARMUP, CHECKED = 11, 3  # steps before a capture; steps that are compared
REPLAYED = "replayed"


def settled(workload: Workload, variant: Variant, group: Group, stream: torch.cuda.Stream) -> Lane:
    """Build a lane of one batch on `stream`, and train it until it can be captured."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module = workload.build().to(group.device)
        model = variant.wrap(module, group.device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, capturable=True)
        lane = Lane(workload, module, model, optimizer, make_batches(workload, group, 1), True)
        lane.steps(WARMUP)
    stream.synchronize()
    return lane


def on_stream(stream: torch.cuda.Stream, call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes the call on `stream`."""

    def run() -> None:
        with torch.cuda.stream(stream):
            call()

    return run


def captured(lane: Lane, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture the lane's next step. The graph uses the lane's memory, and does not keep it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        lane.step()
    return graph


def check(name: str, eager: Lane, graphed: Lane, ways: tuple[Callable[[], None], ...]) -> None:
    """Take CHECKED steps with both.

    Raises:
        CheckFailed: the weights differ by more than a sum in another order makes.
    """
    start = eager.weights()
    for _ in range(CHECKED):
        for way in ways:
            way()
    torch.cuda.synchronize()
    distance = (graphed.weights() - eager.weights()).norm() / (eager.weights() - start).norm()
    if not float(distance) <= ROUNDING:
        raise CheckFailed(f"{name}: replays are {float(distance):.1e} off steps without a graph")


@b.benchmark(
    *(b.models("small"), b.SCALE, b.wrappers(f"{FLOOR},{OURS}"), b.ranks("1", least=1)),
    *(b.SOCKETS, b.rounds(7), b.steps(8)),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    if group.device.type != "cuda":
        raise UsageError("graphs are CUDA's: this benchmark needs a GPU")
    progress = Progress(group)
    for model in args.models:
        workload, ways = b.workload(model, args), dict[str, Callable[[], None]]()
        kept = []  # lanes, as long as their graphs are replayed
        variants = select(args.wrappers).variants
        for variant in variants:
            progress.show(f"{model}: {variant.name}")
            streams = torch.cuda.Stream(), torch.cuda.Stream()
            eager, graphed = (settled(workload, variant, group, s) for s in streams)
            replay = captured(graphed, streams[1]).replay
            ways[variant.name] = on_stream(streams[0], eager.step)
            ways[f"{variant.name}, {REPLAYED}"] = on_stream(streams[1], replay)
            kept.append(graphed)
            check(variant.name, eager, graphed, tuple(ways.values())[-2:])

        def once(name: str) -> float:
            ways[name]()  # noqa: B023
            watch = stopwatch(group.device)
            for _ in range(args.steps):
                ways[name]()  # noqa: B023
            torch.cuda.synchronize()
            return float(watch() / args.steps)

        found = slowest(in_turn(ways, once, args.rounds), group)
        shown = []
        for name in ways:
            own = name.removesuffix(f", {REPLAYED}")
            ratio = asdict(Spread.of(over(found[name], found[own])))
            shown.append(point((model, name), found[name], ratio=ratio))
        yield b.points(model, shown, KIND)
