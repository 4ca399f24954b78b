"""A way to spread a training over ranks, and the engine's own plan for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch

from fastsync.config.policy import BucketPolicy, SyncPolicy, UnitWires
from fastsync.config.topology import Network
from fastsync.fsdp.group_codes import Codes, gradient_codes
from fastsync.planner.record import Record
from fastsync.reducer.bucket_layout import FlatLayout, align_up, outline_regions
from fastsync.reducer.buckets import (
    BucketPlan,
    ParamSpec,
    PlannedBucket,
    ShardSlot,
    coded_regions,
    make_plan,
    regions_codec,
)
from fastsync.wire.formats import Wire, make_codec
from fastsync.zero.partition import element_regions

KINDS = ("0", "1", "2", "3", "hsdp")


class Carrier(Enum):
    """The way of gradients: through memory that the ranks of a machine share, as messages
    between CPUs, or between devices."""

    MEMORY = "memory"
    MESSAGES = "messages"
    DEVICES = "devices"

    @property
    def on_cpu(self) -> bool:
        """Return whether gradients are in host memory."""
        return self is not Carrier.DEVICES


@dataclass(frozen=True)
class Strategy:
    """Placement of parameters, gradients and optimizer state, and the wire format.

    Attributes:
        stage: of ZeRO: 0 repeats everything, 1 shares the optimizer's state and the gradients
            between backward and step, 2 the gradients that accumulate, 3 the parameters.
        world: ranks.
        shards: ranks that share; fewer than `world` where groups of them repeat each other (HSDP).
        wire: a wire format of gradients.
        accumulate: backwards per step.
        masters: parameters of 16 bits have fp32 masters.
        checkpointing: activations of blocks are computed again in the backward.
    """

    stage: int
    world: int
    shards: int
    wire: str = "fp32"
    accumulate: int = 1
    masters: bool = False
    checkpointing: bool = False

    @property
    def hybrid(self) -> bool:
        """Return whether groups that share repeat each other."""
        return self.stage > 0 and self.shards < self.world

    @property
    def possible(self) -> bool:
        """Return whether the wire can carry what this stage sends: shares are added up by parts,
        and those of stage 3 have no error feedback."""
        wire = Wire(self.wire)
        by_parts = self.stage == 0 or wire.adds_by_parts
        return by_parts and not (self.stage == 3 and wire.feedback_for(make_codec(self.wire)))

    @property
    def name(self) -> str:
        """Name in reports."""
        base = "HSDP" if self.hybrid else f"zero={self.stage}"
        wire = "" if self.wire == "fp32" else f", wire={self.wire!r}"
        return base + wire + (", checkpointing" if self.checkpointing else "")


def named(kind: str, world: int, per_node: int) -> Strategy:
    """Return the strategy of one of `KINDS` on `world` ranks."""
    if kind == "hsdp":
        return Strategy(3, world, min(per_node, world))
    return Strategy(int(kind), world, world)


@dataclass(frozen=True)
class Unit:
    """Parameters that are shared together.

    Attributes:
        params: by number; `offsets`: their first elements.
        region: elements of each rank's region.
        first: elements of each parameter that the first rank owns, which owns most.
        largest: likewise, of the rank that owns the largest piece of a parameter.
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    region: int
    first: tuple[int, ...]
    largest: tuple[int, ...]


def _specs(record: Record, wire: str, device: str) -> list[ParamSpec]:
    codec = make_codec(wire)
    specs = (param.spec(index, device) for index, param in enumerate(record.params))
    return [replace(spec, codec=codec) for spec in specs]


def shard_units(record: Record, plan: BucketPlan, shards: int) -> list[Unit]:
    """Return the units that stages 1 and 2 make of a plan's buckets."""
    units = []
    for bucket in plan.buckets:
        params = tuple(sorted(bucket.params))
        numels = [record.params[index].numel for index in params]
        offsets, region = element_regions(numels, shards)
        owned = partial(_owned, offsets, numels, region)
        places = [o // region for o in offsets] if region else [0]
        largest = max({n + more for n in places for more in (0, 1)}, key=lambda n: max(owned(n)))
        units.append(Unit(params, tuple(offsets), region, owned(0), owned(largest)))
    return units


def _owned(
    offsets: Sequence[int], numels: Sequence[int], region: int, rank: int
) -> tuple[int, ...]:
    """Return the elements of each parameter in a rank's region."""
    begin, end = rank * region, (rank + 1) * region
    pairs = zip(offsets, numels, strict=True)
    return tuple(max(0, min(at + numel, end) - max(at, begin)) for at, numel in pairs)


def _slots(units: Sequence[Unit]) -> dict[int, ShardSlot]:
    return {
        param: ShardSlot(number, member, unit.offsets[member], unit.region)
        for number, unit in enumerate(units)
        for member, param in enumerate(unit.params)
    }


def engine_plan(
    record: Record,
    strategy: Strategy,
    network: Network | None = None,
    carrier: Carrier = Carrier.MEMORY,
    buckets: BucketPolicy | None = None,
) -> tuple[BucketPlan, list[Unit]]:
    """Return the plan that the engine makes after its first step, and its units where ranks share.

    Args:
        network: as the first step measures it; None: nothing follows from it.
    """
    seen = network or Network()
    specs = _specs(record, strategy.wire, "cpu" if carrier.on_cpu else "cuda")
    policy = SyncPolicy(wire=Wire(strategy.wire), network=seen)
    caps = buckets or BucketPolicy.from_mb(None)
    if strategy.stage in (1, 2) and carrier is Carrier.MEMORY:
        caps = caps.in_memory(strategy.masters)
    plan = make_plan(specs, record.order, caps.on(seen), policy, strategy.world)
    if strategy.stage not in (1, 2):
        return plan, []
    units = shard_units(record, plan, strategy.shards)
    slots = _slots(units)
    shared = []
    for bucket, unit in zip(plan.buckets, units, strict=True):
        members = [replace(specs[index], shard=slots[index]) for index in unit.params]
        shared.append(_shared(bucket, unit, members, strategy.shards, policy))
    return BucketPlan(tuple(shared)), units


def _shared(
    bucket: PlannedBucket, unit: Unit, members: Sequence[ParamSpec], ranks: int, policy: SyncPolicy
) -> PlannedBucket:
    """Return a bucket in its unit's layout. Which part goes to which rank is left out: of thousands
    of ranks that would be more than all the rest."""
    numels = tuple(spec.numel for spec in members)
    layout = FlatLayout(unit.offsets, numels, -1, unit.region * ranks)
    codec, regions, coded = regions_codec(members, policy, ranks), None, None
    if codec is not None:
        regions = outline_regions(layout, ranks, codec.block)
        coded = coded_regions(codec, regions, policy.wire)
    return replace(
        bucket,
        params=unit.params,
        layout=layout,
        dtype=members[0].dtype,
        views=False,
        coded=coded,
        shards=tuple(spec.shard for spec in members if spec.shard is not None),
        regions=regions,
    )


def codes_of(strategy: Strategy, gradients: torch.dtype) -> Codes | None:
    """Codes that gradients of stage 3 travel in; None: they travel as they are."""
    wires = UnitWires(Wire(strategy.wire))
    return gradient_codes(wires, strategy.shards, (gradients,), gradients)


def coded_units(record: Record, strategy: Strategy) -> dict[int, float]:
    """Return the bytes of a rank's codes of each unit's gradients, those that it keeps among them.

    Empty if gradients travel as they are.
    """
    elements: dict[int, int] = {}
    codes = None
    for param in record.params:
        codes = codes or codes_of(strategy, param.dtype)
        elements[param.unit] = elements.get(param.unit, 0) + param.numel
    if codes is None:
        return {}
    block, ranks, found = codes.block, strategy.shards, {}
    for unit, numel in elements.items():
        chunk = align_up(-(-numel // ranks), block)
        found[unit] = float(ranks * codes.codec.coded_bytes(chunk))
    return found
