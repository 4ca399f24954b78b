"""What parameters without gradient cost, in time and in collectives.

    python -m bench unused --rounds 100 --json out/unused.json

The model is a stack of residual blocks, of which every fourth is left out of the forward. That
saves its compute, whatever wraps the model; so each wrapper is compared with the bare model of the
same control flow. The cost of unused parameters is what synchronisation exposes with them, less
what it exposes without them, in the same round; it is given relative to the step of the model that
uses all. Collectives are counted by torch's profiler, in a step after the timed ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bench.measure import benchmark as b
from bench.models.workload import mean_square, normal_batch, seeded
from examples.common.costs import events_of
from examples.common.ranks import Group, argument, whole
from examples.common.rounds import time_lanes
from examples.common.text import Spread
from examples.common.training import Lane, Workload, make_lanes
from examples.common.variants import Variant, Wrap, ddp, fast_ddp

EVERY = 4  # block is left out
HEADERS = ("wrapper", "step, all used", "step, some unused", "cost of unused", "collectives")
# Buckets of one size: left to itself, fastsync cuts them as the network allows.
OPTIONS = {"find_unused_parameters": True, "bucket_cap_mb": 25}
WRAPPERS: dict[str, Wrap] = {
    "no_sync": lambda module, device: module,
    "ddp, find_unused_parameters=True": ddp(**OPTIONS),
    "fastsync": fast_ddp(**OPTIONS),
}
# What the backends call their collectives in a profile, and what torch does.
BACKENDS = ("gloo:", "nccl:")
COLLECTIVES = ("c10d::allreduce_", "c10d::broadcast_", "c10d::allgather_")


class Blocks(nn.Module):
    """Residual blocks; those whose turn it is are left out where `skip` is set."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if not (self.skip and index % EVERY == 0):
                x = x + block(x)
        return x


def variants() -> tuple[Variant, ...]:
    """Each wrapper twice: with all parameters used, then with some unused."""

    def wrap(how: Wrap, skip: bool) -> Wrap:
        def wrapped(module: nn.Module, device: torch.device) -> nn.Module:
            module.skip = skip  # type: ignore[assignment]
            return how(module, device)

        return wrapped

    kinds = (("all used", False), ("some unused", True))
    pairs = ((name, how, kind) for name, how in WRAPPERS.items() for kind in kinds)
    return tuple(Variant(f"{name}, {text}", wrap(how, skip)) for name, how, (text, skip) in pairs)


def collectives(lane: Lane) -> int:
    """Collectives of one step on this rank."""
    names = events_of(lane.step)
    by_backend = sum(name.startswith(BACKENDS) for name in names)
    return by_backend or sum(name in COLLECTIVES for name in names)


def costs(rounds: list[list[float]]) -> list[Spread]:
    """The relative cost of unused parameters, by wrapper.

    Args:
        rounds: seconds per step, by lane in the order of `variants()` and by round.
    """
    floor_all, floor_some = rounds[0], rounds[1]
    result = []
    for place in range(0, len(rounds), 2):
        every, some = rounds[place], rounds[place + 1]
        rows = zip(every, some, floor_all, floor_some, strict=True)
        result.append(Spread.of([((s - fs) - (e - fe)) / e for e, s, fe, fs in rows]))
    return result


@b.benchmark(
    argument("--depth", "blocks", 16, type=whole),
    argument("--width", "of each block", 512, type=whole),
    *(b.rounds(100), b.steps(4), b.warmup(4), b.RANKS),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    build = seeded(lambda: Blocks(args.depth, args.width))
    # Widths and batch such that a step is mostly compute.
    stack = Workload("blocks", build, normal_batch(32, args.width), mean_square)
    lanes = make_lanes(stack, variants(), group)
    measured = time_lanes(lanes, group, b.settings_of(args))
    seconds = [lane.seconds for lane in measured.values()]
    counts = [collectives(lane) for lane in lanes.values()]
    rows = []
    for index, (name, cost) in enumerate(zip(WRAPPERS, costs(seconds), strict=True)):
        pair = slice(2 * index, 2 * index + 2)
        steps = [f"{1e3 * Spread.of(s).median:.1f} ms" for s in seconds[pair]]
        spread = f"{100 * cost.median:+.1f} % ± {100 * cost.margin(args.rounds):.1f}"
        rows.append((name, *steps, spread, " and ".join(map(str, counts[pair]))))
    title = (
        f"cost of {100 / EVERY:.0f} % unused parameters, relative to the step that uses all, and "
        f"collectives per step without and with them; median of {args.rounds} rounds ± half its "
        "95 % interval"
    )
    yield b.table(title, HEADERS, rows)
