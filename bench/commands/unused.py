"""Cost of parameters without gradient, in time and in collectives.

    python -m bench unused --rounds 100 --json out/unused.json

The model is a stack of residual blocks, every fourth of which is left out of the forward. That
saves its compute under any wrapper, so each wrapper is compared with the bare model of the same
control flow. The cost of unused parameters is the exposed synchronisation with them, less that
without them, in the same round; it is given relative to the step of the model that uses all
parameters. torch's profiler counts collectives, in a step after the timed ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from bench.measure import benchmark as b
from bench.models.workload import normal_batch, seeded
from examples.common.costs import collectives
from examples.common.ranks import Group, argument, whole
from examples.common.rounds import less, over, time_lanes
from examples.common.text import Spread
from examples.common.training import Workload, make_lanes
from examples.common.variants import FLOOR, OURS, Variant, ddp, fast_ddp
from examples.common.variants import VARIANTS as KNOWN

EVERY = 4  # block is left out
KINDS = ("all used", "some unused")
HEADERS = ("wrapper", *(f"step, {kind}" for kind in KINDS), "cost of unused", "collectives")
# Buckets of one size: left to itself, fastsync cuts them as the network allows.
OPTIONS = {"find_unused_parameters": True, "bucket_cap_mb": 25}
VARIANTS = (
    KNOWN[FLOOR],
    Variant("ddp, find_unused_parameters=True", ddp(**OPTIONS)),
    # In memory there is no collective to count.
    Variant(OURS, fast_ddp(shared_memory=False, **OPTIONS)),
)


class Blocks(nn.Module):
    """Residual blocks; those whose turn it is are left out where `skip` is set."""

    def __init__(self, depth: int, width: int, skip: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if not (self.skip and index % EVERY == 0):
                x = x + block(x)
        return x


def stack(args: argparse.Namespace, skip: bool) -> Workload:
    """Return blocks whose widths and batch make a step mostly compute."""
    make = partial(Blocks, args.depth, args.width, skip)
    return seeded("blocks", make, normal_batch(32, args.width))


def cost(seconds: Mapping[str, Sequence[float]], name: str) -> Spread:
    """Return the relative cost of unused parameters under a wrapper.

    Args:
        seconds: per step in each round, by the name of a wrapper and a kind of KINDS.
    """
    every, some = (less(seconds[f"{name}, {k}"], seconds[f"{FLOOR}, {k}"]) for k in KINDS)
    return Spread.of(over(less(some, every), seconds[f"{name}, {KINDS[0]}"]))


@b.benchmark(
    argument("--depth", "blocks", 16, type=whole),
    argument("--width", "of each block", 512, type=whole),
    *(b.rounds(100), b.steps(4), b.warmup(4), b.RANKS),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    lanes = {
        f"{name}, {kind}": lane
        for skip, kind in zip((False, True), KINDS, strict=True)
        for name, lane in make_lanes(stack(args, skip), VARIANTS, group).items()
    }
    seconds = {k: m.seconds for k, m in time_lanes(lanes, group, b.settings_of(args)).items()}
    rows = []
    for name in (variant.name for variant in VARIANTS):
        pair, spread = [f"{name}, {kind}" for kind in KINDS], cost(seconds, name)
        steps = (f"{1e3 * Spread.of(seconds[key]).median:.1f} ms" for key in pair)
        counts = " and ".join(str(collectives(lanes[key])) for key in pair)
        shown = f"{100 * spread.median:+.1f} % ± {100 * spread.margin(args.rounds):.1f}"
        rows.append((name, *steps, shown, counts))
    title = (
        f"cost of {100 / EVERY:.0f} % unused parameters, relative to the step that uses all, and "
        f"collectives per step without and with them; median of {args.rounds} rounds ± half its "
        "95 % interval"
    )
    yield b.table(title, HEADERS, rows)
