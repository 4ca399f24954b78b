"""Steps with AdamW where ranks share the optimizer's state, and gradients: ours and torch's ways.

    python -m bench zero --models gpt2,small --json out/zero.json

Every way trains the same weights, which is checked first. Ratios are to the fastest of torch's
ways, in the same round. Bytes are those that FastDDP's engine counts in a step through the process
group, over what an all-reduce of the gradients takes. FSDP2 has at most UNITS units besides the
model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.measure import benchmark as b
from bench.report.formulas import bus_factor
from examples.common.check import ROUNDING
from examples.common.costs import peak_memory
from examples.common.ranks import CheckFailed, Group
from examples.common.rounds import over, time_lanes
from examples.common.text import Spread, times
from examples.common.training import OPTIMIZERS, Lane, Workload, make_batches, make_lane
from examples.common.variants import OURS, VARIANTS, Variant, available, fast_ddp

DDP = (available("ddp_batched_view") or "ddp_view").split(",")[0]
UNITS, HEAVY = 12, "wide"
SETTLED = 4  # steps until the plan stays

Make = Callable[[Workload, Group], Lane]


def by_variant(name: str) -> Make:
    return lambda workload, group: make_lane(workload, VARIANTS[name], group, "adamw")


def by_redundancy(**options: bool) -> Make:
    """torch's ZeroRedundancyOptimizer beside its fastest DDP."""

    def make(workload: Workload, group: Group) -> Lane:
        lane = make_lane(workload, VARIANTS[DDP], group, "adamw")
        kind: Any = OPTIMIZERS["adamw"]
        lane.optimizer = ZeroRedundancyOptimizer(lane.module.parameters(), kind, **options)
        return lane

    return make


def by_fsdp(workload: Workload, group: Group) -> Lane:
    """torch's FSDP2, which gathers parameters once a step."""
    module = workload.build().to(group.device)
    mesh = init_device_mesh(group.device.type, (group.world,))
    chains = (m for m in module.modules() if isinstance(m, nn.Sequential | nn.ModuleList))
    layers = list(max(chains, key=len, default=nn.Sequential()))
    share = -(-len(layers) // UNITS)
    for begin in range(0, len(layers), share):
        fully_shard(layers[begin : begin + share], mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    made = OPTIMIZERS["adamw"](module.parameters())
    return Lane(workload, module, module, made, make_batches(workload, group), update=True)


TORCHS = {
    DDP: by_variant(DDP),
    f"{DDP}, ZeroRedundancyOptimizer": by_redundancy(),
    f"{DDP}, ZeroRedundancyOptimizer in buckets": by_redundancy(parameters_as_bucket_view=True),
    "FSDP2, not resharded": by_fsdp,
}
STAGES = {f"{OURS}_zero{stage}": stage for stage in (1, 2)}
WAYS = {**TORCHS, **{name: by_variant(name) for name in STAGES}}


def weights(lane: Lane) -> Tensor:
    """All of them, in one vector of fp64. Collective where ranks share them."""
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in lane.module.parameters())
    return torch.cat([p.detach().double().flatten() for p in whole])


def check(lanes: dict[str, Lane], group: Group, steps: int) -> None:
    """Takes steps with all.

    Raises:
        CheckFailed: on every rank, where one trains other weights than DDP.
    """
    start = weights(lanes[DDP])
    for lane in lanes.values():
        lane.steps(steps)
    wanted = weights(lanes[DDP])
    for name, lane in lanes.items() if steps else ():
        distance = float((weights(lane) - wanted).norm() / (wanted - start).norm())
        if not group.most(distance) <= ROUNDING:
            raise CheckFailed(f"{name}: weights are {distance:.1e} off {DDP}'s")


def sent(stage: int, workload: Workload, group: Group) -> int:
    """Bytes that this rank sends in a step where the ranks share no memory."""
    variant = Variant(OURS, fast_ddp(zero=stage, shared_memory=False))
    lane = make_lane(workload, variant, group, "adamw")
    counts = []
    for _ in range(SETTLED):
        lane.step()
        counts.append(lane.model.sync_stats().sent_bytes)
    return int(counts[-1] - counts[-2])


def ratios(steps: dict[str, list[float]]) -> dict[str, str]:
    """A cell for each way; the fastest of torch's is the base, in ms."""
    base = min(TORCHS, key=lambda name: Spread.of(steps[name]).median)
    cells = {name: b.with_margin(over(seconds, steps[base])) for name, seconds in steps.items()}
    return {**cells, base: f"{1e3 * Spread.of(steps[base]).median:.1f} ms"}


@b.benchmark(
    *(b.models("gpt2,small,transformer,wide,conv"), b.SCALE, b.RANKS),
    *(b.rounds(25), b.steps(4), b.warmup(3), b.check_steps(3), b.seconds(60.0)),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    cells: dict[str, list[str]] = {name: [] for name in WAYS}
    counted = dict.fromkeys(WAYS, 0.0)
    for name in args.models:
        workload = b.workload(name, args)
        lanes = {way: make(workload, group) for way, make in WAYS.items()}
        check(lanes, group, args.check_steps)
        measured = time_lanes(lanes, group, b.settings_of(args))
        for way, cell in ratios({way: m.seconds for way, m in measured.items()}).items():
            cells[way].append(cell)
        formula = bus_factor(group.world) * sum(p.nbytes for p in workload.build().parameters())
        for way, stage in STAGES.items():
            counted[way] = max(counted[way], group.most(sent(stage, workload, group)) / formula)
    heavy = b.workload(HEAVY, args)
    for way, make in WAYS.items():
        peak = peak_memory(lambda: make(heavy, group), group)  # noqa: B023
        sent_of = f"{counted[way]:.4f}" if counted[way] else "-"
        cells[way] += [times(peak), sent_of]
    title = f"a step with AdamW over that of the fastest of torch's ways in its round; {b.MARGIN}"
    headers = ("way", *args.models, f"peak memory, {HEAVY}", "bytes sent / DDP's")
    yield b.table(title, headers, [(f"`{way}`", *row) for way, row in cells.items()])
