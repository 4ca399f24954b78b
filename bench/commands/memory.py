"""Memory that gradients hold: their own and that of the buckets they travel in.

The figure is a ratio to the bytes of the gradients: 1 for a bare model, 2 for default DDP, whose
buckets are a second copy. examples/common/costs.py says how bytes are counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from bench.measure import benchmark as b
from examples.common.costs import gradient_memory, peak_memory
from examples.common.ranks import Group, argument
from examples.common.text import times
from examples.common.training import Workload, make_lane
from examples.common.variants import Variant


@b.benchmark(
    *(b.models("transformer,wide,conv"), b.SCALE, b.wrappers("all"), b.RANKS),
    argument("--peak", "that of a step with AdamW, per byte of parameters", action="store_true"),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    held = "memory of gradients and buckets, in bytes per byte of gradients"
    peak = "peak memory of a training step with AdamW, in bytes per byte of parameters"

    def cell(workload: Workload, variant: Variant) -> str:
        if args.peak:
            return times(peak_memory(partial(make_lane, workload, variant, group, "adamw"), group))
        return times(gradient_memory(workload, variant, group))

    yield b.by_variant(peak if args.peak else held, args, cell)
