"""Memory of a training with AdamW as the kernel charges it to all ranks together.

    python -m docs.measure_charged
    python -m docs.measure_charged --ways zero1,zero2 --ranks 4 --json out/charged.json

The sum of the ranks' proportional shares (Pss of /proc/PID/smaps_rollup): pages that ranks share
count once, and memory that the allocator keeps counts, as a memory cgroup counts it. In units of
the parameters' bytes per rank, less what the same processes hold after a small model has trained.
Every way runs in processes of its own. At the peak: the largest of many looks during some steps.
At rest: after the last step, when its gradients are gone. The first steps, in which plans are made
and the optimizer's states appear, are not looked at.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from torch.distributed import fsdp

import fastsync
from bench.commands.zero import by, by_redundancy, by_units
from bench.models.known import GPT2
from bench.models.workload import seeded, tokens
from examples.common.ranks import Group
from examples.common.training import Lane, Workload
from examples.common.variants import OURS, VARIANTS, Variant, fast_ddp
from fastsync.testing import run_ranks

WIDTH, SMALL = 504, 48  # 37 M parameters; of the small model
VOCABULARY = 512
STEPS = 4  # until plan and optimizer are settled; as many are looked at
PAUSE = 0.03  # seconds between two looks
TOKENS = 64  # of a rank: activations are few

Make = Callable[[Workload, Group], Lane]


def _ours(**options: object) -> Make:
    return by(Variant(OURS, fast_ddp(**options)))


WAYS: Mapping[str, Make] = {
    "ddp_view": by(VARIANTS["ddp_view"]),
    "redundancy": by_redundancy(),
    "zero0": _ours(),
    "zero1": _ours(zero=1),
    "zero2": _ours(zero=2),
    "zero2_messages": _ours(zero=2, shared_memory=False),
    "zero3": _ours(zero=3),
    "fully_shard": by_units(fastsync.fully_shard, reshard=True),
    "fsdp2": by_units(fsdp.fully_shard, reshard=True),
}


def workload(width: int) -> Workload:
    """A GPT of twelve blocks whose words are few: no parameter takes a large part of it."""
    make = partial(GPT2, width, VOCABULARY, TOKENS)
    return seeded("gpt", make, tokens(VOCABULARY, 1, TOKENS), torch.mean)


def charged(pids: Sequence[int]) -> int:
    """Bytes of the proportional shares of some processes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _rank(rank: int, world: int, way: str, width: int) -> tuple[float, float]:
    """At the peak and at rest; of rank 0, which looks at all."""
    torch.set_num_threads(1)
    group, make = Group(rank, world, torch.device("cpu")), WAYS[way]
    make(workload(SMALL), group).steps(STEPS)
    gc.collect()
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    before = charged(pids)
    dist.barrier()
    lane = make(workload(width), group)
    lane.steps(STEPS)
    dist.barrier()
    with ThreadPoolExecutor(1) as looking:
        ended = Event()
        seen = looking.submit(lambda: max(iter(lambda: _look(pids, rank, ended), -1), default=0))
        lane.steps(STEPS)
        dist.barrier()
        ended.set()
        peak = seen.result()
    lane.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    time.sleep(0.2)
    dist.barrier()
    rest = charged(pids)
    dist.barrier()
    unit = world * 4 * sum(p.numel() for p in workload(width).build().parameters())
    return (peak - before) / unit, (rest - before) / unit


def _look(pids: Sequence[int], rank: int, ended: Event) -> int:
    """-1 at the end."""
    if rank != 0 or ended.wait(PAUSE):
        return -1
    return charged(pids)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m docs.measure_charged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="some of the default, by commas")
    parser.add_argument(
        "--width", type=int, default=WIDTH, help=f"of the GPT (default: {WIDTH}, 37 M parameters)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--json", type=Path, help="the figures for programs")
    args = parser.parse_args(argv)
    ways = args.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: {unknown[0]!r} is none of {', '.join(WAYS)}")
    found = {}
    print("Memory of all ranks, per rank and byte of parameters: at the peak (at rest).")
    for way in ways:
        peak, rest = run_ranks(_rank, args.ranks, way, args.width, timeout=900.0)[0]
        found[way] = {"peak": peak, "rest": rest}
        print(f"  {way:16} {peak:.2f} ({rest:.2f})", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
