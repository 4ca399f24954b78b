"""Step time of every way to synchronise gradients, measured side by side.

    python -m bench step --models small,gpt2 --ranks 2,4 --rounds 15 --json out/step.json

Weights are checked against default DDP's before anything is timed. A step is zero_grad, forward
and backward; --optimizer adds an optimizer's step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.measure import benchmark as b
from bench.report import tables
from examples.common.ranks import Group, argument
from examples.common.rounds import measure, model_record
from examples.common.training import OPTIMIZERS
from examples.common.variants import FLOOR, select

OPTIMIZER = argument("--optimizer", "time this optimizer's step as well", choices=tuple(OPTIMIZERS))


@b.benchmark(
    b.models("small,transformer,wide,conv"),
    *(b.SCALE, b.wrappers("all"), b.ranks(least=1), b.SOCKETS, b.BASELINE, OPTIMIZER),
    *(b.rounds(15), b.steps(4), b.warmup(3), b.check_steps(4), b.seconds()),
    kind="step",
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """All models; where there are several numbers of ranks, a model's name carries them."""
    selection = select(args.wrappers, required=(FLOOR, args.baseline))
    for name in args.models:
        model = b.workload(name, args)
        record = model_record(model, measure(model, selection.variants, group, b.settings_of(args)))
        key = name if len(args.ranks) == 1 else f"{name}, {group.world} ranks"
        size = f"{record['tensors']} tensors, {record['gradient_bytes'] / 1e6:.1f} MB of gradients"
        table = tables.steps(record["variants"], args.baseline, args.markdown)
        part = {"skipped": selection.skipped, "models": {key: record}}
        yield b.Shown(f"{name}: {size}\n{table}", part)
