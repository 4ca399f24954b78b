"""Cost of synchronisation on the host as models and worlds grow: planning, wrapping, stepping.

    python -m bench scale --parameters 10,100,1000,10000 --worlds 2,64,4096 --json out/scale.json

Parameters have 16 elements each, and their gradients are made beforehand: no layer computes, and a
step consists of hooks, buckets and collectives. The first part runs in one process, on fake process
groups of any size, whose collectives do nothing. It times a plan, the wrapping of a module (without
one-time compilation and loading) and a backward. torch's DDP cannot run a backward on a fake group.
The second part runs on two real ranks over loopback, beside torch's DDP. The time of the bare
module's backward in the same round is subtracted from each backward.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from bench.measure import benchmark as b
from bench.measure.bare import BareList
from bench.measure.jobs import Job
from bench.report.tables import Point, point
from examples.common.ranks import Group, argument
from examples.common.rounds import host_seconds, in_turn, less, slowest
from examples.common.text import Progress
from examples.common.variants import FLOOR, OURS, VARIANTS, available
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.reducer.buckets import ParamSpec, make_plan

KIND = "scale"
NUMEL = 16
REAL = available("ddp", "ddp_batched_view", OURS).split(",")
WARMUP, WRAPS = 4, 3

Pairs = dict[str, tuple[BareList, nn.Module]]  # the module, and what is called


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks, of which this process is the first and the others are not.

    torch keeps it for tests of its own; collectives on it return at once.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_seconds(module: nn.Module, world: int) -> float:
    """Return the seconds of making a plan for the module's parameters."""
    specs = [ParamSpec.of(i, p) for i, p in enumerate(module.parameters())]
    order, buckets = list(range(len(specs))), BucketPolicy.from_mb(None)
    return host_seconds(lambda: make_plan(specs, order, buckets, SyncPolicy(), world))


def backwards(pairs: Pairs, rounds: int, before: Callable[[], object]) -> dict[str, list[float]]:
    """Return the seconds of backwards that hand a gradient to every parameter."""

    def once(name: str) -> float:
        module, model = pairs[name]
        before()
        model.zero_grad(set_to_none=True)
        module.ready += [torch.ones_like(p) for p in module.list]
        return host_seconds(model().backward)

    in_turn(pairs, once, WARMUP)  # plans settle
    return in_turn(pairs, once, rounds)


def pairs_of(count: int, names: list[str], device: torch.device) -> tuple[Pairs, list[float]]:
    """Return the bare list of parameters and wrapped ones, and the seconds that each wrap took."""
    bare = BareList([NUMEL] * count, device)
    pairs: Pairs = {FLOOR: (bare, bare)}
    wraps = []
    for name in names:
        module = BareList([NUMEL] * count, device)
        start = time.perf_counter()
        pairs[name] = (module, VARIANTS[name].wrap(module, device))
        wraps.append(time.perf_counter() - start)
    return pairs, wraps


def on_fake(world: int, count: int, rounds: int, device: torch.device) -> list[Point]:
    """Plan, wrap and backward on a fake group."""
    with fake_group(world):
        wraps = [pairs_of(count, [OURS], device)[1][0] for _ in range(WRAPS)]
        pairs, _ = pairs_of(count, [OURS], device)
        times = backwards(pairs, rounds, gc.collect)
        plans = [plan_seconds(pairs[FLOOR][0], world) for _ in range(rounds)]
        pairs.clear()
    found = {"plan": plans, "wrap": wraps, "backward": less(times[OURS], times[FLOOR])}
    scene, size = ("fake group", f"{world} ranks"), f"{count} parameters"
    return [point((*scene, name, size), seconds) for name, seconds in found.items()]


def on_ranks(args: argparse.Namespace, group: Group, progress: Progress) -> Iterator[Point]:
    """Return the backward on real ranks, FastDDP's beside torch's."""
    for count in args.parameters:
        progress.show(f"{group.world} ranks: {count} parameters")
        pairs, _ = pairs_of(count, REAL, group.device)
        times = slowest(backwards(pairs, args.rounds, dist.barrier), group)
        for name in REAL:
            of = ("loopback", f"{group.world} ranks", name, f"{count} parameters")
            yield point(of, less(times[name], times[FLOOR]))


@b.benchmark(
    argument("--parameters", "how many", "10,100,1000,10000", type=b.numbers(int)),
    argument("--worlds", "ranks of fake groups", "2,64,1024,4096", type=b.numbers(int)),
    *(b.ranks(), b.rounds(7)),
    kind=KIND,
    jobs=lambda args: [Job(0), *map(Job, args.ranks)],
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """On fake groups where this process has none, else on its own."""
    progress = Progress(group)
    if dist.is_initialized():
        found = list(on_ranks(args, group, progress))
        yield b.points(f"backward, ms, {group.world} ranks", found, KIND)
        return
    on_fake(2, 10, 1, group.device)  # loads the extension
    for world in args.worlds:
        found = []
        for count in args.parameters:
            progress.show(f"fake group of {world}: {count} parameters")
            found += on_fake(world, count, args.rounds, group.device)
        yield b.points(f"fake group of {world} ranks", found, KIND)
