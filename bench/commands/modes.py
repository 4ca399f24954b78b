"""Whether models learn as well when ranks average now and then: losses and bytes of trainings.

    python -m bench modes --ranks 4 --json out/modes.json

The models of `bench curves` are trained from the same weights on the same batches, in each mode of
`sync=`, several times with other batches. The loss that counts is that of held-out data after the
last step, once all ranks have averaged. With `--pretrain` all begin with weights that have been
trained before, as published trainings of DiLoCo do. `calm` has an outer momentum of 0.5, and
`SparseLoCo` is DiLoCo with an outer learning rate of 1 and error feedback in place of outer
momentum.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from torch import nn

from bench.commands.curves import TASKS, Curve, Task, train
from bench.measure import benchmark as b
from examples.common.ranks import Group, argument, whole
from fastsync import ChunkedTopK, Delayed, DiLoCo, LocalSGD, Wire

REFERENCE = "every step"
STEPS, SEEDS = 256, 3
SEED_STEPS = 100_000  # between the batches of two trainings
CALM = partial(DiLoCo, outer_momentum=0.5)

MODES: Mapping[str, dict[str, Any]] = {
    REFERENCE: {"wire": Wire(shared_memory=False)},
    "LocalSGD(8)": {"sync": LocalSGD(8)},
    "LocalSGD(32)": {"sync": LocalSGD(32)},
    "Delayed(1)": {"sync": Delayed(1)},
    "DiLoCo(32)": {"sync": DiLoCo(32)},
    "DiLoCo(30) calm": {"sync": CALM(30)},
    "DiLoCo(64) calm": {"sync": CALM(64)},
    "DiLoCo(32) calm int4": {"sync": CALM(32, wire="int4")},
    "DiLoCo(32) calm int4 streamed": {"sync": CALM(32, fragments=4, overlap=2, wire="int4")},
    "SparseLoCo(32)": {"sync": DiLoCo(32, 1.0, 0.0, wire=ChunkedTopK(1 / 32))},
}


def with_seed(task: Task, seed: int) -> Task:
    """Return the same task on other batches."""
    return replace(task, batch=lambda rank, step: task.batch(rank, step + seed * SEED_STEPS))


def pretrained(task: Task, steps: int, group: Group) -> Task:
    """Return the same from weights that `steps` steps have made, with averages of gradients."""
    module = task.build()
    train(replace(task, build=lambda: module), MODES[REFERENCE], steps, group)
    weights = module.state_dict()

    def build() -> nn.Module:
        fresh = task.build()
        fresh.load_state_dict(weights)
        return fresh

    return replace(task, build=build)


@b.benchmark(
    argument("--tasks", "to learn", "all", type=b.names("task", TASKS)),
    argument("--modes", "to train in", "all", type=b.names("mode", MODES)),
    argument("--steps", "of every training; far fewer say little", STEPS, type=whole),
    argument("--seeds", "trainings in each mode", SEEDS, type=whole),
    argument(
        "--pretrain", "steps that make the weights to begin with", 0, type=partial(whole, least=0)
    ),
    b.RANKS,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Return how far losses are above those of every step, and the bytes that a rank sends."""
    modes = dict.fromkeys((REFERENCE, *args.modes))
    found = {task: {mode: list[Curve]() for mode in modes} for task in args.tasks}
    for name, curves in found.items():
        task = TASKS[name]()
        if args.pretrain:
            task = pretrained(with_seed(task, args.seeds), args.pretrain, group)
        for mode, seed in product(modes, range(args.seeds)):
            curve = train(with_seed(task, seed), MODES[mode], args.steps, group)
            curves[mode].append(curve)
            if group.is_main:
                print(f"{name} in {mode}: loss {curve.final:.4f}", flush=True)
    rows = []
    for mode in modes:
        cells = [f"`{mode}`"]
        for curves in found.values():
            pairs = zip(curves[mode], curves[REFERENCE], strict=True)
            above = [curve.excess(its) for curve, its in pairs]
            cells.append(f"{mean(above):+.2%} ({min(above):+.2%} to {max(above):+.2%})")
        sent = [curves[name][0].sent for curves in found.values() for name in (mode, REFERENCE)]
        rows.append([*cells, f"{sent[0] / args.steps / 1e3:,.1f}", f"1/{sent[1] / sent[0]:.0f}"])
    headers = ["mode", *(f"{task}: above every step (by seed)" for task in found)]
    headers += [f"kB sent a step, {args.tasks[0]}", "of every step"]
    lines = {
        task: {mode: list(its[0].points) for mode, its in curves.items()}
        for task, curves in found.items()
    }
    steps = f"{args.pretrain} + {args.steps}" if args.pretrain else f"{args.steps}"
    title = f"loss of held-out data after {steps} steps on {group.world} ranks"
    yield b.table(title, headers, rows, lines=lines)
