"""Whether models learn as well when ranks average now and then: losses and bytes of trainings.

    python -m bench modes --ranks 4 --json out/modes.json

The byte-level GPT of `bench curves` is trained from the same weights on the same batches, in each
mode of `sync=`, several times with other batches. The loss that counts is that of held-out data
after the last step, once all ranks have averaged. `SparseLoCo` is DiLoCo with an outer learning
rate of 1 and error feedback in place of outer momentum.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from bench.commands.curves import Curve, Task, gpt_task, train
from bench.measure import benchmark as b
from examples.common.ranks import Group, argument, whole
from fastsync import ChunkedTopK, Delayed, DiLoCo, LocalSGD, TopK, Wire

REFERENCE = "every step"
STEPS, SEEDS = 256, 2
SEED_STEPS = 100_000  # between the batches of two trainings

MODES: Mapping[str, dict[str, Any]] = {
    REFERENCE: {"wire": Wire(shared_memory=False)},
    "LocalSGD(8)": {"sync": LocalSGD(8)},
    "LocalSGD(32)": {"sync": LocalSGD(32)},
    "Delayed(1)": {"sync": Delayed(1)},
    "DiLoCo(32)": {"sync": DiLoCo(32)},
    "DiLoCo(32, int4)": {"sync": DiLoCo(32, wire="int4")},
    "DiLoCo(32, topk 1/32)": {"sync": DiLoCo(32, wire=TopK(1 / 32))},
    "DiLoCo(32, chunked topk 1/32)": {"sync": DiLoCo(32, wire=ChunkedTopK(1 / 32))},
    "SparseLoCo(32, 1/32)": {"sync": DiLoCo(32, 1.0, 0.0, wire=ChunkedTopK(1 / 32))},
    "DiLoCo(32, int4, streamed)": {"sync": DiLoCo(32, fragments=4, overlap=2, wire="int4")},
    "DiLoCo(64)": {"sync": DiLoCo(64)},
}


def with_seed(task: Task, seed: int) -> Task:
    """Return the same task on other batches."""
    return replace(task, batch=lambda rank, step: task.batch(rank, step + seed * SEED_STEPS))


@b.benchmark(
    argument("--steps", "of every training; far fewer say little", STEPS, type=whole),
    argument("--seeds", "trainings in each mode", SEEDS, type=whole),
    b.RANKS,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Return the final losses beside those of every step, and the bytes that a rank sends."""
    task, found = gpt_task(), dict[str, list[Curve]]()
    for name, options in MODES.items():
        for seed in range(args.seeds):
            curve = train(with_seed(task, seed), options, args.steps, group)
            found.setdefault(name, []).append(curve)
            if group.is_main:
                print(f"{name}: loss {curve.final:.4f} after {args.steps} steps", flush=True)
    reference, rows = found[REFERENCE], []
    for name, curves in found.items():
        above = [curve.excess(its) for curve, its in zip(curves, reference, strict=True)]
        sent = mean(curve.sent for curve in curves) / args.steps
        fewer = reference[0].sent / args.steps / sent
        cells = [f"{mean(c.final for c in curves):.4f}", f"{mean(above):+.2%}"]
        cells += [f"{min(above):+.2%} to {max(above):+.2%}", f"{sent / 1e3:,.1f}", f"1/{fewer:.0f}"]
        rows.append([f"`{name}`", *cells])
    headers = ["mode", "loss", "against every step", "by seed", "kB sent a step", "of every step"]
    lines = {"gpt": {name: list(curves[0].points) for name, curves in found.items()}}
    title = f"loss of held-out data after {args.steps} steps on {group.world} ranks"
    yield b.table(title, headers, rows, lines=lines)
