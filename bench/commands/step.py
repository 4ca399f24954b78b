"""Step time of every way to synchronise gradients, measured side by side.

    python -m bench step --models small,gpt2 --ranks 2,4 --rounds 15 --json out/step.json

Weights are checked against default DDP's before anything is timed. A step is zero_grad, forward
and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.measure import benchmark as b
from examples.common.ranks import Group
from examples.common.rounds import measure, model_record, table
from examples.common.variants import BASELINE, FLOOR, select


@b.benchmark(
    b.models("small,transformer,wide,conv"),
    *(b.SCALE, b.wrappers("all"), b.ranks(least=1), b.SOCKETS),
    *(b.rounds(15), b.steps(4), b.warmup(3), b.check_steps(4), b.seconds()),
    kind="step",
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """All models; where there are several numbers of ranks, a model's name carries them."""
    selection = select(args.wrappers, required=(FLOOR, BASELINE))
    for name in args.models:
        model = b.workload(name, args)
        timings = measure(model, selection.variants, group, b.settings_of(args))
        record = model_record(model, timings)
        key = name if len(args.ranks) == 1 else f"{name}, {group.world} ranks"
        size = f"{record['tensors']} tensors, {record['gradient_bytes'] / 1e6:.1f} MB of gradients"
        part = {"skipped": selection.skipped, "models": {key: record}}
        yield b.Shown(f"{name}: {size}\n{table(timings, {})}", part)
