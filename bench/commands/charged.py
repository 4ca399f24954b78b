"""Memory of a training with AdamW as the kernel charges it to all ranks together.

    python -m bench charged --json out/charged.json
    python -m bench charged --ways zero1,zero2 --ranks 4

The figure is the sum of the ranks' proportional set sizes (Pss of /proc/PID/smaps_rollup), in which
a page that ranks share counts once, as in a memory cgroup. It is in units of the parameters' bytes
per rank, less what the same processes hold after a small model has trained in them. Every way runs
in processes of its own; the process that starts them looks.

Large tensors get mappings of their own (MALLOC_MMAP_THRESHOLD_), so what is freed goes back to the
kernel. With --heap glibc puts them into its heap, as it does by default, and what that keeps free
counts: it depends on the order in which tensors are freed, not only on how many there are.

At the peak: the largest of many looks during some steps of zero_grad (to None), forward, backward
and the optimizer's step. The first steps, in which plans are made and the optimizer's state
appears, are not looked at. At rest: after the last step, with the gradients that it leaves. A step
has few tokens, so activations are small beside parameters: the model has 37 M of them.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import fsdp

import fastsync
from bench.commands.zero import Make, by, by_redundancy, by_units
from bench.measure import benchmark as b
from bench.models.known import GPT2
from bench.models.workload import seeded, tokens
from examples.common.ranks import CheckFailed, Group, argument, whole
from examples.common.text import Progress, times
from examples.common.training import Lane, Workload
from examples.common.variants import OURS, VARIANTS, Variant, fast_ddp

WIDTH, SMALL, VOCABULARY, TOKENS = 504, 48, 512, 8
WARMUP, STEPS = 6, 10  # until plan and optimizer are settled; that are looked at
SETTLE_SECONDS = 0.3  # threads of the backends release buffers a little later
THRESHOLD, LARGE = "MALLOC_MMAP_THRESHOLD_", 128 << 10


def _ours(**options: object) -> Make:
    return by(Variant(OURS, fast_ddp(**options)))


WAYS: Mapping[str, Make] = {
    "ddp_view": by(VARIANTS["ddp_view"]),
    "redundancy": by_redundancy(),
    "fsdp2": by_units(fsdp.fully_shard, reshard=True),
    "zero0": _ours(),
    "zero1": _ours(zero=1),
    "zero2": _ours(zero=2),
    "zero2_messages": _ours(zero=2, shared_memory=False),
    "zero3": _ours(zero=3),
    "zero3_messages": _ours(zero=3, shared_memory=False),
    "fully_shard": by_units(fastsync.fully_shard, reshard=True),
}


@dataclass(frozen=True)
class Charged:
    """Memory of all ranks, per rank and byte of parameters."""

    peak: float
    rest: float


def workload(width: int) -> Workload:
    """Return a GPT of twelve blocks whose words are few: no parameter takes a large part of it."""
    make = partial(GPT2, width, VOCABULARY, TOKENS)
    return seeded("gpt", make, tokens(VOCABULARY, 1, TOKENS), torch.mean)


def charged(pids: Sequence[int]) -> int:
    """Return the bytes of the proportional set sizes of some processes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _train(rank: int, world: int, folder: str, way: str, width: int, pipe: Connection) -> None:
    """Train on one rank; report each phase when it is reached, and go on when told to."""

    def meet() -> None:
        dist.barrier()
        gc.collect()
        pipe.send(os.getpid())
        pipe.recv()

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    group, make = Group(rank, world, torch.device("cpu")), WAYS[way]
    _steps(make(workload(SMALL), group), WARMUP)
    meet()
    lane = make(workload(width), group)
    _steps(lane, WARMUP)
    meet()
    _steps(lane, STEPS)
    meet()
    dist.barrier()
    del lane
    gc.collect()
    dist.destroy_process_group()


def _steps(lane: Lane, count: int) -> None:
    for _ in range(count):
        lane.step()


def _looked_at(pipes: Sequence[Connection], pids: Sequence[int]) -> int:
    """Return the largest of many looks until all ranks have come to the next phase."""
    most = 0
    while not all(pipe.poll(0.001) for pipe in pipes):
        most = max(most, charged(pids))
    return most


def measure(way: str, width: int, world: int) -> Charged:
    """Train in one way, in new processes with this one's environment.

    Raises:
        CheckFailed: a rank has ended early.
    """
    context, pipes = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            here, there = context.Pipe()
            args = (rank, world, folder, way, width, there)
            ranks.append(context.Process(target=_train, args=args, daemon=True))
            ranks[-1].start()
            there.close()
            pipes.append(here)
        try:
            found = _phases(pipes)
        except EOFError as error:
            raise CheckFailed(f"{way}: a rank has ended early") from error
        for each in ranks:
            each.join()
    unit = world * 4 * sum(p.numel() for p in workload(width).build().parameters())
    return Charged(*(bytes_ / unit for bytes_ in found))


def _phases(pipes: Sequence[Connection]) -> tuple[int, int]:
    """Return the bytes at the peak and at rest."""
    pids = [pipe.recv() for pipe in pipes]
    time.sleep(SETTLE_SECONDS)
    before = charged(pids)
    _go_on(pipes)
    for pipe in pipes:
        pipe.recv()
    _go_on(pipes)
    peak = _looked_at(pipes, pids)
    for pipe in pipes:
        pipe.recv()
    time.sleep(SETTLE_SECONDS)
    rest = charged(pids)
    _go_on(pipes)
    return max(peak, rest) - before, rest - before


def _go_on(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.send(None)


@b.benchmark(
    argument("--ways", f"of {', '.join(WAYS)}", "all", type=b.names("way", WAYS)),
    argument("--width", "of the GPT; 504: 37 M parameters", WIDTH, type=whole),
    argument("--heap", "leave glibc's allocator as it is by default", action="store_true"),
    b.RANKS,
    jobs=b.one_process,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    os.environ.pop(THRESHOLD, None)
    if not args.heap:
        os.environ[THRESHOLD] = str(LARGE)
    title = "memory of all ranks with AdamW, per rank and byte of parameters"
    rows = []
    for way in args.ways:
        Progress(group).show(way)
        found = measure(way, args.width, args.ranks)
        rows.append((f"`{way}`", times(found.peak), times(found.rest)))
    yield b.table(title, ("way", "at the peak", "at rest"), rows, environment={"ranks": args.ranks})
