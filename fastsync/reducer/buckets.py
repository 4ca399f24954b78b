"""From parameters and policy to buckets: which gradient goes where, and in which order.

A plan is a pure function of its arguments, so ranks that agree on those hold the same plan.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fastsync.config.policy import BucketPolicy, SyncPolicy, piece_bytes
from fastsync.reducer.bucket_layout import (
    ALIGNMENT,
    FlatLayout,
    PayloadLayout,
    RegionLayout,
    align_up,
    dense_layout,
    flat_layout,
    payload_layout,
    region_layout,
    region_payload,
    slot_layout,
)
from fastsync.wire.formats import FORMATS, AnyCodec, CodecLike, Format, Wire, native_dtype

_FP32 = FORMATS["fp32"]


@dataclass(frozen=True)
class ShardSlot:
    """Position of a parameter in a unit, whose gradients each rank keeps a region of.

    Attributes:
        unit: number of the unit.
        member: position of the parameter in it.
        offset: first real element.
        region: elements of each rank's region, of the whole unit.
    """

    unit: int
    member: int
    offset: int
    region: int


@dataclass(frozen=True)
class ParamSpec:
    """Facts about one parameter that planning needs.

    Attributes:
        index: position among the model's parameters.
        numel: real elements (a complex number counts as two).
        dtype: real dtype.
        sparse: its gradient may be a sparse tensor, which travels alone.
        pairs: its elements are complex; hooks must not see them mixed with real ones.
        codec: the format it is meant to travel in.
        shard: its place where the ranks share its gradient; such parameters travel by unit.
        group: which ranks average it: 0 for those of the process group, else the position in
            `SyncPolicy.groups`, from 1 on. Such parameters have buckets of their own.
        local: it is the local tensor of a DTensor, whose gradient keeps its memory.
        counted: elements by which buckets are filled, where ranks that fill the same buckets have
            parts of it that differ in size.
    """

    index: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    pairs: bool = False
    codec: AnyCodec = _FP32
    shard: ShardSlot | None = None
    group: int = 0
    local: bool = False
    counted: int | None = None

    @classmethod
    def of(
        cls, index: int, param: torch.Tensor, sparse: bool = False, codec: AnyCodec = _FP32
    ) -> ParamSpec:
        real = param.dtype.to_real() if param.is_complex() else param.dtype
        numel = param.numel() * (2 if param.is_complex() else 1)
        return cls(index, numel, real, param.device, sparse, param.is_complex(), codec)

    @property
    def nbytes(self) -> int:
        return (self.numel if self.counted is None else self.counted) * self.dtype.itemsize


@dataclass(frozen=True)
class CodedPlan:
    """Plan of a bucket that travels as something else than gradients in one all-reduce.

    Attributes:
        codec: a `Format` or a user's codec.
        form: "two_shot", "gather"; "scatter" where each rank gets its regions alone.
        layout: of what travels.
        node_ranks: ranks that first sum a bucket as it is; the form is then that between nodes.
    """

    codec: AnyCodec
    form: str
    layout: PayloadLayout
    error_feedback: bool
    node_ranks: int = 1


@dataclass(frozen=True)
class PlannedBucket:
    """One bucket: parameter indices in slot order, and where they lie in the flat buffer.

    Where `coded` is given, the bucket travels as bytes and `dtype` is the gradients' own. Where
    `shards` are, one per parameter, each rank keeps its own region of the averages, and `regions`
    says how that reaches it.
    """

    params: tuple[int, ...]
    layout: FlatLayout
    dtype: torch.dtype
    views: bool
    sparse: bool
    coded: CodedPlan | None = None
    shards: tuple[ShardSlot, ...] = ()
    regions: RegionLayout | None = None
    group: int = 0

    @property
    def format_name(self) -> str:
        """Return the name of the format that the bucket travels as."""
        return self.coded.codec.name if self.coded else str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Return the bytes that a rank hands to collectives."""
        if self.coded is None and self.regions is not None:
            chunk = align_up(self.regions.numel + self.regions.flags, ALIGNMENT)
            return self.regions.chunks * chunk * self.dtype.itemsize
        if self.coded is None:
            return self.layout.numel * self.dtype.itemsize
        layout = self.coded.layout
        if self.coded.node_ranks > 1:  # as fp32, inside the node
            return 4 * layout.chunks * (layout.chunk_numel + layout.flags_per_chunk)
        if self.regions is not None:
            return layout.chunks * layout.chunk_bytes
        return layout.bytes_for(self.layout.numel)


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which every rank sends them."""

    buckets: tuple[PlannedBucket, ...]

    @cached_property
    def params(self) -> tuple[int, ...]:
        """Positions of the parameters, in the order of the buckets."""
        return tuple(index for bucket in self.buckets for index in bucket.params)

    def pipelined(self, group: int) -> bool:
        """Return whether any bucket of a group travels through a pipeline of collectives."""
        return any(
            bucket.coded is not None and (bucket.regions is None or bucket.coded.node_ranks > 1)
            for bucket in self.buckets
            if bucket.group == group
        )


def travels_coded(codec: AnyCodec, gradient: torch.dtype) -> bool:
    """Return whether gradients of real dtype `gradient` take the form of `codec`.

    16-bit gradients are compressed below 16 bits only; fp64 gradients stay fp64.
    """
    if gradient is torch.float32:
        return True
    narrower = not isinstance(codec, Format) or codec.bits < 16
    return gradient in (torch.float16, torch.bfloat16) and narrower


def feeds_back(spec: ParamSpec, wire: Wire) -> bool:
    """Return whether `wire` feeds back what coding this gradient loses.

    That its bucket is small, or that the first steps travel as fp32, changes nothing here.
    """
    native = wire.form_for(spec.codec, 1, spec.device) == "native"
    return _may_be_coded(spec) and not native and wire.feedback_for(spec.codec)


def _may_be_coded(spec: ParamSpec) -> bool:
    return not spec.sparse and not spec.pairs and travels_coded(spec.codec, spec.dtype)


def make_plan(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    buckets: BucketPolicy,
    policy: SyncPolicy,
    world_size: int,
    node_ranks: int = 1,
) -> BucketPlan:
    """Fill buckets with gradients in the order in which they become ready.

    Each bucket holds one dtype on one device and is closed when it reaches its cap. Buckets are
    sent in the order of their last gradients, so that none waits for one that comes after those of
    its successor.

    Args:
        specs: the parameters to plan for.
        order: their indices in expected ready order; it may name others too.
        node_ranks: ranks of a node in the hierarchical form.
    """
    by_index = {spec.index: spec for spec in specs}
    ordered = [by_index[i] for i in order if i in by_index]
    if len({spec.index for spec in ordered}) != len(specs) or len(ordered) != len(specs):
        raise ValueError("the order must name every planned parameter exactly once")
    groups = _group(ordered, buckets)
    return BucketPlan(tuple(_planned(group, policy, world_size, node_ranks) for group in groups))


def settled_order(ready: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return `ready` with the members of each group in the group's own order.

    A compiled graph yields its gradients all at once, in an order that means nothing. Where graphs
    were split by a plan, the plan made from the observed order must be that plan again.

    Args:
        ready: indices of parameters, each once.
        groups: what each graph yields; the latest group with an index holds.
    """
    owner = {index: number for number, group in enumerate(groups) for index in group}
    there = set(ready)
    queues = [
        iter([index for index in group if owner[index] == number and index in there])
        for number, group in enumerate(groups)
    ]
    return [next(queues[owner[index]]) if index in owner else index for index in ready]


@dataclass
class _OpenGroup:
    """A bucket being filled; `latest` is the position of its newest gradient in the order."""

    specs: list[ParamSpec] = field(default_factory=list)
    nbytes: int = 0
    latest: int = 0


def _group(ordered: Sequence[ParamSpec], policy: BucketPolicy) -> list[list[ParamSpec]]:
    open_groups: dict[object, _OpenGroup] = {}
    closed: list[_OpenGroup] = []
    left = sum(spec.nbytes for spec in ordered if not spec.sparse)
    for position, spec in enumerate(ordered):
        if spec.sparse:
            closed.append(_OpenGroup([spec], latest=position))
            continue
        key: object = (spec.dtype, spec.device, spec.pairs, spec.codec, spec.group, spec.local)
        if spec.shard is not None:  # which ends with its last gradient, however large it is
            key = (spec.shard.unit, spec.codec)
        group = open_groups.setdefault(key, _OpenGroup())
        group.specs.append(spec)
        group.nbytes += spec.nbytes
        group.latest = position
        left -= spec.nbytes
        full = group.nbytes >= policy.limit(len(closed), group.nbytes + left)
        if full and spec.shard is None:
            closed.append(open_groups.pop(key))
    by_last_gradient = sorted([*closed, *open_groups.values()], key=lambda group: group.latest)
    return [group.specs for group in by_last_gradient]


def _planned(
    group: Sequence[ParamSpec], policy: SyncPolicy, world_size: int, node_ranks: int
) -> PlannedBucket:
    gradient, number = group[0].dtype, group[0].group
    if group[0].shard is not None:
        return _sharded(group, policy, world_size, node_ranks)
    if number > 0:
        world_size = len(policy.groups[number - 1].ranks)
    codec = _codec_of(group, policy)
    nodes = world_size // node_ranks
    if (node_ranks > 1 or number > 0) and nodes == 1:
        codec = None  # nothing leaves the node, or the rank
    if codec is not None:
        form = policy.wire.form_for(codec, nodes, group[0].device)
        if form != "native":
            return _coded(group, policy, codec, (form, nodes, node_ranks))
    native = _native_dtype(group[0], codec, policy)
    numels = [spec.numel for spec in group]
    return PlannedBucket(
        params=tuple(spec.index for spec in group),
        layout=(
            dense_layout(numels)
            if policy.hooked
            else flat_layout(numels, world_size, policy.flagged)
        ),
        dtype=native,
        views=policy.views and native == gradient and not group[0].local,
        sparse=group[0].sparse,
        group=number,
    )


def _sharded(
    group: Sequence[ParamSpec], policy: SyncPolicy, world_size: int, node_ranks: int
) -> PlannedBucket:
    """Return a bucket of members of a unit that are trained, in the unit's layout."""
    pairs = [(spec.shard, spec) for spec in group if spec.shard is not None]
    pairs.sort(key=lambda pair: pair[0].member)
    shards = tuple(shard for shard, _ in pairs)
    specs = [spec for _, spec in pairs]
    slots = FlatLayout(
        tuple(shard.offset for shard in shards),
        tuple(spec.numel for spec in specs),
        -1,
        shards[0].region * world_size,
    )
    codec = regions_codec(specs, policy, world_size, node_ranks)
    regions = region_layout(slots, world_size, 1 if codec is None else codec.block)
    coded = None
    if codec is None and specs[0].device.type == "cpu":
        regions = replace(regions, chunks=regions.chunks - 1)  # a rank keeps its own
    elif codec is not None:
        coded = coded_regions(codec, regions, policy.wire, node_ranks)
    return PlannedBucket(
        params=tuple(spec.index for spec in specs),
        layout=slots,
        dtype=specs[0].dtype,
        views=False,
        sparse=False,
        coded=coded,
        shards=shards,
        regions=regions,
    )


def regions_codec(
    specs: Sequence[ParamSpec], policy: SyncPolicy, world_size: int, node_ranks: int = 1
) -> AnyCodec | None:
    """Return the format of a bucket whose regions ranks own; None if gradients are not coded."""
    codec = _codec_of(specs, policy)
    if (codec is _FP32 and node_ranks == 1) or node_ranks == world_size:
        return None  # nothing would become smaller, or leave the node
    return codec


def coded_regions(
    codec: AnyCodec, regions: RegionLayout, wire: Wire, node_ranks: int = 1
) -> CodedPlan:
    """Return how chunks of `regions` travel as codes."""
    layout = region_payload(regions, codec.coded_bytes)
    return CodedPlan(codec, "scatter", layout, wire.feedback_for(codec), node_ranks)


def _native_dtype(spec: ParamSpec, codec: AnyCodec | None, policy: SyncPolicy) -> torch.dtype:
    """Return the dtype that the backend sums. Mixed precision names that of all real gradients."""
    if policy.mixed.reduce is not None and not spec.sparse and not spec.pairs:
        return policy.mixed.reduce
    native = None if codec is None else native_dtype(codec)
    return native or spec.dtype


def _codec_of(group: Sequence[ParamSpec], policy: SyncPolicy) -> AnyCodec | None:
    """Return the bucket's format; None where its gradients travel as they are."""
    first = group[0]
    small = sum(spec.nbytes for spec in group) < policy.wire.min_bytes
    return first.codec if not small and not policy.hooked and _may_be_coded(first) else None


def _coded(
    group: Sequence[ParamSpec],
    policy: SyncPolicy,
    codec: Format | CodecLike,
    way: tuple[str, int, int],
) -> PlannedBucket:
    form, nodes, node_ranks = way
    slots = slot_layout([spec.numel for spec in group], codec.block)
    parts = node_ranks * (nodes if form == "two_shot" else 1)
    coded_bytes = codec.coded_bytes
    share = coded_bytes(slots.numel) / max(1, sum(spec.nbytes for spec in group))
    at_a_time = piece_bytes(policy.wire, policy.network.at_share(share), group[0].device)
    if getattr(codec, "whole", False):
        whole = codec.coded_bytes(sum(slots.numels))
        coded_bytes, at_a_time = lambda numel: whole, sys.maxsize
    if node_ranks > 1 and not isinstance(codec, Format):
        at_a_time = sys.maxsize  # a user's codec sees its shard as a whole
    layout = payload_layout(slots, parts, coded_bytes, _flags(group, policy), at_a_time)
    feedback = policy.wire.feedback_for(codec)
    return _coded_bucket(group, slots, CodedPlan(codec, form, layout, feedback, node_ranks))


def _flags(group: Sequence[ParamSpec], policy: SyncPolicy) -> int:
    return len(group) + 1 if policy.flagged else 0


def _coded_bucket(group: Sequence[ParamSpec], slots: FlatLayout, coded: CodedPlan) -> PlannedBucket:
    return PlannedBucket(
        params=tuple(spec.index for spec in group),
        layout=slots,
        dtype=group[0].dtype,
        views=False,
        sparse=False,
        coded=coded,
        group=group[0].group,
    )
