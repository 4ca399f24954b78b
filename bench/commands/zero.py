"""Steps with AdamW where ranks share the optimizer's state, and gradients: ours and torch's ways.

    python -m bench zero --models gpt2,small --json out/zero.json
    python -m bench zero --stages 3 --link 1gbit --models gpt2 --json out/zero3.json

Every way trains the same weights, which is checked first; those that round gradients, with SGD, as
`bench step` does; those that round parameters too (`_both`), by tests alone. Ratios are to the
fastest of torch's ways in the same round; in stage 3, to DDP and FSDP2, and `no_sync`, which
averages nothing, shows the least. Bytes are what the engine counts in a step through the process
group, over those of an all-reduce; the most of all models. Operators are what a step of the first
model dispatches beyond the bare one. Units are at most UNITS besides the model, or FastDDP's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import fastsync
from bench.measure import benchmark as b
from bench.measure.netns import Link
from bench.report.formulas import bus_factor
from examples.common.check import ROUNDING
from examples.common.costs import dispatched_ops, events_of, peak_memory
from examples.common.ranks import CheckFailed, Group, argument
from examples.common.rounds import checked, over, time_lanes
from examples.common.text import Spread, times
from examples.common.training import OPTIMIZERS, Lane, Workload, make_batches, make_lane
from examples.common.variants import FLOOR, OURS, VARIANTS, Variant, available, fast_ddp

DDP = (available("ddp_batched_view") or "ddp_view").split(",")[0]
FSDP2, UNITS, HEAVY = "FSDP2", 12, "deep"
SETTLED, INT8 = 4, {"wire": "int8"}  # steps until the plan stays; gradients' wire
WIRES = {"": {}, "_int8": INT8, "_int8_both": {**INT8, "parameter_wire": "int8"}}

Make = Callable[[Workload, Group], Lane]


def by(variant: Variant) -> Make:
    return lambda workload, group: make_lane(workload, variant, group, "adamw")


def by_redundancy(**options: bool) -> Make:
    """torch's ZeroRedundancyOptimizer beside its fastest DDP."""

    def make(workload: Workload, group: Group) -> Lane:
        lane = make_lane(workload, VARIANTS[DDP], group, "adamw")
        kind: Any = OPTIMIZERS["adamw"]
        lane.optimizer = ZeroRedundancyOptimizer(lane.module.parameters(), kind, **options)
        return lane

    return make


def by_units(fully_shard: Callable[..., object], reshard: bool) -> Make:
    """torch's or our fully_shard; without `reshard`, parameters are gathered once a step."""

    def make(workload: Workload, group: Group) -> Lane:
        module = workload.build().to(group.device)
        mesh = init_device_mesh(group.device.type, (group.world,))
        chains = (m for m in module.modules() if isinstance(m, nn.Sequential | nn.ModuleList))
        layers = list(max(chains, key=len, default=nn.Sequential()))
        share = -(-len(layers) // UNITS)
        for begin in range(0, len(layers), share):
            fully_shard(layers[begin : begin + share], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)  # its backward comes next
        made = OPTIMIZERS["adamw"](module.parameters())
        return Lane(workload, module, module, made, make_batches(workload, group), update=True)

    return make


@dataclass(frozen=True)
class Stages:
    """The variants of one comparison.

    Attributes:
        wrapped: options of FastDDP, by variant.
        others: variants without FastDDP.
        bases: variants that steps are compared with; empty: the fastest of torch's.
    """

    wrapped: Mapping[str, Mapping[str, object]]
    others: Mapping[str, Make]
    bases: tuple[str, ...] = ()

    @property
    def ways(self) -> dict[str, Make]:
        made = {name: by(Variant(OURS, fast_ddp(**how))) for name, how in self.wrapped.items()}
        return {**self.others, **made}

    def compared(self, steps: Mapping[str, Sequence[float]]) -> dict[str, list[str]]:
        """Return the cells of each way: over every base, which itself is in ms."""
        median = {name: Spread.of(seconds).median for name, seconds in steps.items()}
        torchs = (name for name in self.others if not name.startswith(OURS))
        bases = self.bases or (min(torchs, key=lambda name: median[name]),)

        def cell(name: str, base: str) -> str:
            of_base = b.with_margin(over(steps[name], steps[base]))
            return f"{1e3 * median[base]:.1f} ms" if name == base else of_base

        return {name: [cell(name, base) for base in bases] for name in steps}


REDUNDANT, IN_BUCKETS = f"{DDP}, ZeroRedundancyOptimizer", {"parameters_as_bucket_view": True}
STAGES = {
    "1,2": Stages(
        {
            f"{OURS}_zero{stage}{suffix}": {"zero": stage, **wires}
            for suffix, wires in WIRES.items()
            for stage in (1, 2)
        },
        {
            DDP: by(VARIANTS[DDP]),
            REDUNDANT: by_redundancy(),
            f"{REDUNDANT} in buckets": by_redundancy(**IN_BUCKETS),
            f"{FSDP2}, not resharded": by_units(fsdp.fully_shard, reshard=False),
            f"{OURS}.fully_shard, not resharded": by_units(fastsync.fully_shard, reshard=False),
        },
    ),
    "3": Stages(
        {f"{OURS}_zero3{suffix}": {"zero": 3, **WIRES[suffix]} for suffix in ("", "_int8_both")},
        {
            **{name: by(VARIANTS[name]) for name in (FLOOR, DDP)},
            FSDP2: by_units(fsdp.fully_shard, reshard=True),
            f"{OURS}.fully_shard": by_units(fastsync.fully_shard, reshard=True),
        },
        (DDP, FSDP2),
    ),
}


def check(lanes: dict[str, Lane], group: Group, steps: int) -> None:
    """Take steps with all.

    Raises:
        CheckFailed: on every rank, where one that keeps fp32 trains other weights than DDP.
    """
    start = lanes[DDP].weights()
    for lane in lanes.values():
        lane.steps(steps)
    wanted = lanes[DDP].weights()
    for name, lane in lanes.items() if steps else ():
        distance = float((lane.weights() - wanted).norm() / (wanted - start).norm())
        if not name.endswith((FLOOR, *tuple(WIRES)[1:])) and not group.most(distance) <= ROUNDING:
            raise CheckFailed(f"{name}: weights are {distance:.1e} off {DDP}'s")


def sent(options: Mapping[str, object], workload: Workload, group: Group) -> float:
    """Return the bytes that a rank sends in a step where the ranks share no memory, over DDP's."""
    lane = by(Variant(OURS, fast_ddp(**options, shared_memory=False)))(workload, group)
    counts = []
    for _ in range(SETTLED):
        lane.step()
        counts.append(lane.model.sync_stats().sent_bytes)
    ddps = bus_factor(group.world) * sum(p.nbytes for p in workload.build().parameters())
    return group.most((counts[-1] - counts[-2]) / ddps) if ddps else 0.0


def measure(
    stages: Stages, workload: Workload, args: argparse.Namespace, group: Group
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Check and time every way; return its cells and operators."""
    link, ways = Link.here(group.world), stages.ways
    link.shape(None)  # building broadcasts the weights
    rounded = tuple(VARIANTS[name] for name in ways if name in VARIANTS and VARIANTS[name].lossy)
    checked(workload, rounded, group, args.check_steps if rounded else 0)
    lanes = {name: make(workload, group) for name, make in ways.items()}
    link.shape(args.link.rate)  # before the first step, from which plans are made
    check(lanes, group, args.check_steps)
    measured = time_lanes(lanes, group, b.settings_of(args))
    link.shape(None)
    bare = dispatched_ops(workload, VARIANTS[FLOOR], group)
    backwards = {name: lambda lane=lane: lane.forward().backward() for name, lane in lanes.items()}
    seen = {name: events_of(backward) for name, backward in backwards.items()}
    counts = {name: f"{group.most(len(events) - bare):+.0f}" for name, events in seen.items()}
    return stages.compared({name: of.seconds for name, of in measured.items()}), counts


@b.benchmark(
    argument("--stages", "of ZeRO, 1,2 or 3", "1,2", choices=tuple(STAGES)),
    *(b.models("gpt2,small,transformer,wide,conv"), b.SCALE, b.LINK, b.RANKS, b.SOCKETS),
    *(b.rounds(25), b.steps(4), b.warmup(3), b.check_steps(3), b.seconds(60.0)),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    stages, heavy = STAGES[args.stages], b.workload(HEAVY, args)
    ways, counted, operators = stages.ways, dict.fromkeys(stages.wrapped, 0.0), dict[str, str]()
    cells: dict[str, list[str]] = {name: [f"`{name}`"] for name in ways}
    for name in args.models:
        workload = b.workload(name, args)
        found, counts = measure(stages, workload, args, group)
        operators = operators or counts
        for way in ways:
            cells[way] += found[way]
        for way, options in stages.wrapped.items():
            counted[way] = max(counted[way], sent(options, workload, group))
    for way, make in ways.items():
        peak = times(peak_memory(lambda: make(heavy, group), group))  # noqa: B023
        cells[way] += [peak, f"{counted[way]:.4f}" if way in counted else "-", operators[way]]
    bases = [f" / {base}" for base in stages.bases] or [""]
    columns = [name + base for name in args.models for base in bases]
    last = (f"peak memory, {HEAVY}", "bytes sent / DDP's", f"operators, {args.models[0]}")
    base = " and ".join(stages.bases) or "the fastest of torch's ways"
    title = f"a step with AdamW ({args.link.name}) over that of {base} in its round; {b.MARGIN}"
    yield b.table(title, ("way", *columns, *last), list(cells.values()))
