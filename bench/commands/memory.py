"""Memory that gradients hold: their own and that of the buckets they travel in.

The figure is a ratio to the bytes of the gradients: 1 for a bare model, 2 for default DDP, whose
buckets are a second copy. examples/common/costs.py says how bytes are counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.measure import benchmark as b
from examples.common.costs import gradient_memory, peak_memory
from examples.common.ranks import Group, argument
from examples.common.training import make_lane
from examples.common.variants import Variant, select


@b.benchmark(
    *(b.models("transformer,wide,conv"), b.SCALE, b.wrappers("all"), b.RANKS),
    argument(
        "--peak", "the peak of a step with AdamW, per byte of parameters", action="store_true"
    ),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    title = "memory of gradients and buckets, in bytes per byte of gradients"

    def measure(name: str, variant: Variant) -> float | None:
        workload = b.workload(name, args)
        if args.peak:
            return peak_memory(lambda: make_lane(workload, variant, group, "adamw"), group)
        return gradient_memory(workload, variant, group)

    if args.peak:
        title = "peak memory of a training step with AdamW, in bytes per byte of parameters"
    rows = []
    for variant in select(args.wrappers).variants:
        found = [measure(name, variant) for name in args.models]
        cells = ("n/a" if value is None else f"{value:.2f}x" for value in found)
        rows.append((variant.name, *cells))
    yield b.table(title, ("variant", *args.models), rows)
