"""Operators dispatched on the CPU in one training step: the host's cost of synchronisation.

Counted are the CPU events of torch.profiler over one optimizer.zero_grad(), forward and backward,
after warm-up. The count is exact. Work in C++ that calls no operator is not seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.measure import benchmark as b
from examples.common.costs import dispatched_ops
from examples.common.ranks import Group


@b.benchmark(b.models("ops400"), b.SCALE, b.wrappers("all"), b.RANKS)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    title = "operators dispatched per step (zero_grad, forward, backward)"
    yield b.by_variant(title, args, lambda m, variant: str(dispatched_ops(m, variant, group)))
