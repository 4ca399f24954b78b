"""Steps that plans are judged by, of several models on several links: python -m docs.measure_steps

    python -m docs.measure_steps --json docs/measured/steps.json

For each link, number of ranks and model: all-reduces of two sizes, the step of a rank that talks to
nobody, its optimizer's part of that, and steps of every way in turns with it (fp32 and int8 of
stages 0, 1 and 3). Stage 2 makes the same step as stage 1 unless gradients accumulate. Slower links
have smaller models, so that all takes about twenty minutes. It needs a quiet machine, and
what `bench links` needs. docs/planner_steps.py shows the result.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import benchmark as b
from bench.measure.netns import Link, LinkName
from bench.models import WORKLOADS
from bench.models.workload import CPU_SCALE
from examples.common.ranks import Group
from examples.common.rounds import time_lanes
from examples.common.training import Workload, make_lane
from examples.common.variants import FLOOR, VARIANTS, Variant, fast_ddp

CALIBRATE, JUDGE = ("wide", "small", "deep"), ("transformer", "gpt2", "conv")
SMALLER = {"gpt2": CPU_SCALE, "deep": 1 / 8}  # models that are too large for two cores
# Share of a model's parameters by the link's bits per second, from the fastest.
SCALES = ((5e9, 1.0), (5e8, 1 / 4), (0.0, 1 / 16))
WAYS: dict[str, dict[str, Any]] = {
    "zero=0": {},
    "zero=0, int8": {"wire": "int8"},
    "zero=1": {"zero": 1},
    "zero=3": {"zero": 3},
    "zero=1, int8": {"zero": 1, "wire": "int8"},
    "zero=3, int8": {"zero": 3, "wire": "int8"},
}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
PROBES, PROBE_SECONDS, LARGEST = 5, 0.05, 1 << 24  # all-reduces of each size; bytes


def keep_pages() -> None:
    """Has the C library keep what is freed, as the allocators do that torch recommends on CPUs.

    Ways take turns in one process. Otherwise which of them pays for the pages that another one has
    returned to the system is chance, and the same step takes a third longer in another run.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is None or not (tune(M_TRIM_THRESHOLD, 2**31 - 1) and tune(M_MMAP_MAX, 0)):
        raise SystemExit("needs glibc, whose malloc can be told to keep its pages")


def scale_on(link: LinkName) -> float:
    rate = link.bits_per_second or SCALES[0][0]
    return next(scale for least, scale in SCALES if rate >= least)


def scaled(name: str, scale: float) -> Workload:
    """A model at this share of the size that suits two cores."""
    return WORKLOADS[name](scale=scale * SMALLER.get(name, 1.0))


def probe(group: Group, link: LinkName) -> list[tuple[int, float]]:
    """Bytes and seconds of all-reduces."""
    wanted = int((link.bits_per_second or 1e12) / 8 * PROBE_SECONDS)
    found = []
    for size in (1 << 14, max(1 << 17, min(LARGEST, wanted))):
        tensor, times = torch.ones(size // 4), []
        for _ in range(PROBES + 1):
            dist.barrier()
            times.append(group.timed(partial(dist.all_reduce, tensor)))
        found.append((size, group.most(median(times[1:]))))
    return found


def time_updates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Seconds of each of its steps from now on: as they take place, since a step on gradients that
    nobody has just written is another one."""
    started, seconds = [0.0], list[float]()

    def begin(*_: Any) -> None:
        started[0] = time.perf_counter()

    def end(*_: Any) -> None:
        seconds.append(time.perf_counter() - started[0])

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
    return seconds


def measure(
    name: str, link: LinkName, args: argparse.Namespace, group: Group, here: Link
) -> dict[str, Any]:
    """A cell: seconds of everything that plans need to know, and of the steps themselves."""
    here.shape(None)  # building broadcasts the weights
    scale = scale_on(link) if args.scale is None else args.scale
    workload = scaled(name, scale)
    wrapped = {way: Variant(way, fast_ddp(**how)) for way, how in WAYS.items()}
    floor = VARIANTS[FLOOR]
    lanes = {way: make_lane(workload, v, group, "adamw") for way, v in wrapped.items()}
    lanes |= {FLOOR: make_lane(workload, floor, group, "adamw")}
    updates = time_updates(lanes[FLOOR].optimizer)
    here.shape(link.rate)  # before the first step, from which plans are made
    probes = probe(group, link)
    measured = time_lanes(lanes, group, b.settings_of(args))
    alone = median(measured.pop(FLOOR).seconds)
    return {
        "link": link.name,
        "ranks": group.world,
        "model": name,
        "scale": scale,
        "probes": probes,
        "alone": alone,
        "update": min(alone, group.most(median(updates))),
        "steps": {way: median(found.seconds) for way, found in measured.items()},
    }


@b.benchmark(
    b.links("loopback,10gbit,1gbit,100mbit"),
    b.ranks("2,4"),
    b.models(",".join((*CALIBRATE, *JUDGE))),
    *(b.SCALE, b.rounds(9), b.steps(1), b.warmup(3), b.seconds(21.0)),
    kind="planned steps",
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Those of the links that this rank's place allows."""
    keep_pages()
    here = Link.here(group.world)
    for link in here.these(args.links):
        for name in args.models:
            gc.collect()
            cell = measure(name, link, args, group, here)
            shown = ", ".join(f"{way}: {1e3 * s:.1f} ms" for way, s in cell["steps"].items())
            title = f"{link.name}, {group.world} ranks, {name}: alone {1e3 * cell['alone']:.1f} ms"
            yield b.Shown(f"{title}; {shown}", {"cells": [cell]})


if __name__ == "__main__":
    raise SystemExit(main())
