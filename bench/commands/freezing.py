"""What it costs to train two halves of one wrapped model in turn, as a GAN in one wrapper does.

    python -m bench freezing --models small,wide --json out/freezing.json

While one half's optimizer trains it, the other half is frozen by `requires_grad_(False)`; a step is
one turn of each. torch's DDP needs `find_unused_parameters=True` for that, FastDDP goes back and
forth between two plans. Both wrappers must train the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from bench.measure import benchmark as b
from examples.common.ranks import CheckFailed, Group
from examples.common.rounds import over, time_lanes
from examples.common.text import Spread
from examples.common.training import OPTIMIZERS, Lane, make_lanes
from examples.common.variants import OURS, Variant, ddp, fast_ddp

DDP = "ddp, find_unused_parameters=True"
VARIANTS = (Variant(DDP, ddp(find_unused_parameters=True)), Variant(OURS, fast_ddp()))


def halved(module: nn.Module) -> nn.Sequential:
    layers = list(module.children())
    middle = len(layers) // 2
    return nn.Sequential(nn.Sequential(*layers[:middle]), nn.Sequential(*layers[middle:]))


@dataclass
class InTurn(Lane):
    """Trains one half of its model after the other."""

    def __post_init__(self) -> None:
        halves = self.module.children()
        self.turns = [(half, OPTIMIZERS["sgd"](half.parameters())) for half in halves]

    def step(self) -> Tensor:
        for half, optimizer in self.turns:
            self.module.requires_grad_(False)
            half.requires_grad_(True)
            self.optimizer = optimizer
            loss = super().step()
        return loss


@b.benchmark(
    *(b.models("small,wide", ("small", "wide")), b.SCALE, b.RANKS),
    *(b.rounds(40), b.steps(3), b.warmup(4), b.seconds(25.0)),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    rows = []
    for name in args.models:
        workload = b.workload(name, args)
        in_halves = replace(workload, build=lambda: halved(workload.build()))  # noqa: B023
        made = make_lanes(in_halves, VARIANTS, group, "sgd")
        lanes: dict[str, Lane] = {name: InTurn(**vars(lane)) for name, lane in made.items()}
        measured = time_lanes(lanes, group, b.settings_of(args))
        theirs, ours = (measured[variant.name].seconds for variant in VARIANTS)
        weights = (parameters_to_vector(lane.module.parameters()) for lane in lanes.values())
        if group.world == 2 and not group.all_agree(next(weights).equal(next(weights))):
            raise CheckFailed(f"{name}: FastDDP trained other weights than DDP")
        plans = f"{lanes[OURS].model.sync_stats()['plans']} in {lanes[OURS].position} turns"
        times = (f"{1e3 * Spread.of(seconds).median:.1f} ms" for seconds in (theirs, ours))
        rows.append((name, *times, b.with_margin(over(ours, theirs)), plans))
    title = f"a turn of each half, and FastDDP's over DDP's in the same round; {b.MARGIN}"
    yield b.table(title, ("model", DDP, OURS, "FastDDP / DDP", "plans"), rows)
