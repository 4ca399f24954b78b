"""All-reduces of a bare fp32 tensor: Gloo's, and in memory that the ranks of one machine share.

    python -m bench allreduce --sizes 1,10,100 --ranks 2,4

A rate is the tensor's bytes over the time of the slowest rank. In memory the buffers of all N ranks
are read and written once, 2 N times the tensor's bytes, as if each rank copied its buffer. The last
column compares that traffic with the ranks' copying, all at once. It may exceed 100 %: a copy has to
fetch the lines that it overwrites, which a sum in place has read anyway. The three take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from bench.measure import benchmark as b
from examples.common.ranks import Group, UsageError, argument
from fastsync.engine import core
from fastsync.engine.memory import share_memory
from fastsync.torch_private import default_group

HEADERS = ("MB", "Gloo, GB/s", "in memory, GB/s", "memory / Gloo", "of copying")


def _seconds(turns: list[Callable[[], object]], rounds: int, group: Group) -> list[float]:
    """Medians, each of the slowest rank."""
    times: list[list[float]] = [[] for _ in turns]
    for _ in range(rounds + 1):
        for turn, found in zip(turns, times, strict=True):
            dist.barrier()
            found.append(group.timed(turn))
    slowest = group.max(torch.tensor([found[1:] for found in times], dtype=torch.float64))
    return [median(row) for row in slowest.tolist()]


@b.benchmark(
    argument("--sizes", "of the tensor, in MB", "1,10,100", type=b.numbers(float)),
    *(b.ranks(), b.rounds(15)),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    memory = share_memory(default_group(), int(1e6 * max(args.sizes)))
    if memory is None:
        raise UsageError("these ranks share no memory: FASTSYNC_SHM=0, or they are on GPUs")
    collective, rows = core.make_collective(memory, 0), []
    for size in args.sizes:
        numel = int(size * 1e6) // 4
        shared, own, other = memory.make_flat(numel, torch.float32), *torch.zeros(2, numel)
        turns = [
            lambda: dist.all_reduce(own),  # noqa: B023
            lambda: collective.all_reduce(shared),  # noqa: B023
            lambda: other.copy_(own),  # noqa: B023
        ]
        gloo, ours, copy = _seconds(turns, args.rounds, group)
        rates = (f"{size / 1e3 / seconds:.2f}" for seconds in (gloo, ours))
        rows.append((f"{size:g}", *rates, f"{gloo / ours:.1f}x", f"{copy / ours:.0%}"))
    yield b.table(f"all-reduce of fp32, {group.world} ranks", HEADERS, rows)
