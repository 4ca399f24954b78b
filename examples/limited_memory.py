"""A model that takes more memory than a process may have: zero=0 fails, zero=3 trains it.

    python -m examples.limited_memory --ranks 2

With AdamW in fp32, zero=0 takes four times the bytes of the parameters: these, their gradients and
two moments. With zero=3 a rank has its share of all that, and whole layers only while they compute.
Linux gives a rank no more private memory than `--limit` times the bytes of the parameters. Exits
with 1 unless zero=0 runs out of it on every rank and zero=3 learns; peaks are in the same unit.
"""

from __future__ import annotations

import argparse
import os
import resource
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from examples import data, gpt
from examples.common.costs import PEAK_STEPS, peak_memory
from examples.common.ranks import Group, Parser, argument, launch, whole
from examples.common.text import times
from examples.common.training import Workload, make_lane
from examples.common.variants import Variant, fast_ddp

SHAPE = gpt.Shape(width=512, heads=8, layers=24, length=32)
STAGE = "LIMITED_MEMORY_STAGE"  # tells a rank which one it runs


def limit_memory(nbytes: int) -> None:
    """Limit the private memory of this process to its present size plus `nbytes`."""
    now = 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, resource.RLIM_INFINITY))


def run(limit: float, stage: int, group: Group) -> int:
    losses: list[float] = []

    def seen(loss: Tensor) -> Tensor:
        losses.append(group.mean(loss))
        return loss

    batch = partial(data.load().batch, size=2, length=SHAPE.length)
    workload = Workload("gpt", partial(gpt.build, shape=SHAPE), batch, seen)
    variant = Variant("", fast_ddp(zero=stage, shared_memory=False))  # which has no limit
    with torch.device("meta"):
        limit_memory(int(limit * sum(p.nbytes for p in workload.build().parameters())))
    try:
        peak = peak_memory(lambda: make_lane(workload, variant, group, "adamw"), group)
    except RuntimeError as error:
        print(f"zero={stage}, rank {group.rank}: {str(error).splitlines()[0]}", flush=True)
        return int(stage != 0 or "memory" not in str(error))
    if group.is_main:
        print(f"zero={stage}: losses", *map("{:.2f}".format, losses), f"peak {times(peak)}")
    before, after = losses[:PEAK_STEPS], losses[PEAK_STEPS:]  # of the same batches
    return int(stage == 0 or not sum(after) < sum(before))


def start(args: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is limited is the memory of a process
    codes = []
    for stage in (os.environ[STAGE],) if STAGE in os.environ else ("0", "3"):
        os.environ[STAGE] = stage
        codes.append(launch(partial(run, args.limit, int(stage)), args.ranks))
    return max(codes)


if __name__ == "__main__":
    ranks = argument("--ranks", "processes to start", 2, type=whole)
    limit = argument("--limit", "of memory, in bytes per byte of the parameters", 3.3, type=float)
    raise SystemExit(Parser("examples.limited_memory", __doc__, ranks, limit).run(start))
