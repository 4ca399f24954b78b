"""All-reduces of a bare fp32 tensor: Gloo's, and in memory that the ranks of one machine share.

A rate is the tensor's bytes over the time of the slowest rank. In memory the buffers of all N ranks
are read and written once, as if each rank copied its own; the last column is the rate beside that
of all ranks' copying at once. It may exceed 100 %: a copy has to fetch the lines that it
overwrites, which a sum in place has read anyway. The three take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist

from bench.measure import benchmark as b
from examples.common.ranks import Group, UsageError, argument
from examples.common.rounds import slowest
from fastsync._torch import default_group
from fastsync.reducer import core
from fastsync.reducer.shared_memory import share_memory

HEADERS = ("MB", "Gloo, GB/s", "in memory, GB/s", "memory / Gloo", "of copying")


@b.benchmark(argument("--sizes", "in MB", "1,10,100", type=b.numbers(float)), b.RANKS, b.rounds(15))
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    memory = share_memory(default_group(), int(1e6 * max(args.sizes)))
    if memory is None:
        raise UsageError("these ranks share no memory: FASTSYNC_SHM=0, or they are on GPUs")
    collective, rows = core.SharedCollective(memory, 0), []
    for size in args.sizes:
        numel = int(size * 1e6) // 4
        shared, (own, other) = memory.make_flat(numel, torch.float32), torch.ones(2, numel)
        times: dict[str, list[float]] = {"gloo": [], "ours": [], "copy": []}
        for _ in range(args.rounds + 1):
            dist.barrier()
            times["gloo"].append(group.timed(lambda: dist.all_reduce(own)))  # noqa: B023
            times["ours"].append(group.timed(lambda: collective.all_reduce(shared)))  # noqa: B023
            dist.barrier()
            times["copy"].append(group.timed(lambda: other.copy_(own)))  # noqa: B023
        gloo, ours, copy = (median(found[1:]) for found in slowest(times, group).values())
        rates = (f"{size / 1e3 / seconds:.3g}" for seconds in (gloo, ours))
        rows.append((f"{size:g}", *rates, f"{gloo / ours:.1f}x", f"{copy / ours:.0%}"))
    yield b.table(f"all-reduce of fp32, {group.world} ranks", HEADERS, rows)
