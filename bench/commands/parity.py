"""Whether whole trainings end in the same weights as under default DDP.

    python -m bench parity --steps 50

Every model is trained with every optimizer, once under default DDP and once under each variant, on
the same data. Exit code 1 where a variant breaks its promise: the same bits for fp32 on two ranks,
rounding on more, and a stated distance for narrower wires.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from bench.measure import benchmark as b
from examples.common.check import judge, train
from examples.common.ranks import Group, argument, whole
from examples.common.text import Progress
from examples.common.training import OPTIMIZERS
from examples.common.variants import BASELINE, OURS, VARIANTS, select


@b.benchmark(
    *(b.models("small,transformer,wide,conv"), b.SCALE, b.wrappers(OURS), b.RANKS),
    argument("--steps", "optimizer steps", 50, type=whole),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    variants, progress = select(args.wrappers).variants, Progress(group)
    cells: dict[str, list[str]] = {variant.name: [] for variant in variants}
    pairs = list(itertools.product(args.models, OPTIMIZERS))
    for model, optimizer in pairs:
        workload = b.workload(model, args)
        expected = train(workload, VARIANTS[BASELINE], group, optimizer, args.steps)
        for variant in variants:
            progress.show(f"{model}, {optimizer}: {args.steps} steps under {variant.name}")
            trained = train(workload, variant, group, optimizer, args.steps)
            cells[variant.name].append(judge(variant, trained, expected, group))
    headers = ("variant", *(f"{model}, {optimizer}" for model, optimizer in pairs))
    title = f"weights after {args.steps} steps on {group.world} ranks, against default DDP"
    yield b.table(title, headers, [(name, *found) for name, found in cells.items()])
