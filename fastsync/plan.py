"""From parameters and policy to buckets: which gradient goes where, and in which order.

A plan is a pure function of its arguments, so ranks that agree on those hold the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fastsync.config import BucketPolicy, SyncPolicy, wire_dtype
from fastsync.layout import FlatLayout, dense_layout, flat_layout

__all__ = ["BucketPlan", "ParamSpec", "PlannedBucket", "make_plan", "settled_order"]


@dataclass(frozen=True)
class ParamSpec:
    """What planning needs to know about one parameter.

    Attributes:
        index: position among the model's parameters.
        numel: real elements (a complex number counts as two).
        dtype: real dtype.
        sparse: its gradient may be a sparse tensor, which travels alone.
        pairs: its elements are complex; hooks must not see them mixed with real ones.
    """

    index: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    pairs: bool = False

    @classmethod
    def of(cls, index: int, param: torch.Tensor, sparse: bool = False) -> ParamSpec:
        real = param.dtype.to_real() if param.is_complex() else param.dtype
        numel = param.numel() * (2 if param.is_complex() else 1)
        return cls(index, numel, real, param.device, sparse, param.is_complex())

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedBucket:
    """One bucket: parameter indices in slot order, and where they lie in the flat buffer."""

    params: tuple[int, ...]
    layout: FlatLayout
    wire: torch.dtype
    views: bool
    sparse: bool


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which every rank sends them."""

    buckets: tuple[PlannedBucket, ...]


def make_plan(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    buckets: BucketPolicy,
    policy: SyncPolicy,
    world_size: int,
) -> BucketPlan:
    """Fills buckets with gradients in the order in which they become ready.

    Each bucket holds one dtype on one device and is closed when it reaches its cap. Buckets are
    sent in the order of their last gradients, so that none waits for one that comes after those of
    its successor.

    Args:
        specs: the parameters to plan for.
        order: their indices in expected ready order; it may name others too.
    """
    by_index = {spec.index: spec for spec in specs}
    ordered = [by_index[i] for i in order if i in by_index]
    if len({spec.index for spec in ordered}) != len(specs) or len(ordered) != len(specs):
        raise ValueError("the order must name every planned parameter exactly once")
    groups = _group(ordered, buckets)
    return BucketPlan(tuple(_planned(group, policy, world_size) for group in groups))


def settled_order(ready: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """`ready` with the members of each group in the group's own order.

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
    open_groups: dict[tuple[torch.dtype, torch.device, bool], _OpenGroup] = {}
    closed: list[_OpenGroup] = []
    for position, spec in enumerate(ordered):
        if spec.sparse:
            closed.append(_OpenGroup([spec], latest=position))
            continue
        key = (spec.dtype, spec.device, spec.pairs)
        group = open_groups.setdefault(key, _OpenGroup())
        group.specs.append(spec)
        group.nbytes += spec.nbytes
        group.latest = position
        if group.nbytes >= policy.caps[min(len(closed), len(policy.caps) - 1)]:
            closed.append(open_groups.pop(key))
    by_last_gradient = sorted([*closed, *open_groups.values()], key=lambda group: group.latest)
    return [group.specs for group in by_last_gradient]


def _planned(group: Sequence[ParamSpec], policy: SyncPolicy, world_size: int) -> PlannedBucket:
    gradient = group[0].dtype
    sparse = group[0].sparse
    complex_mixed = group[0].pairs and policy.mixed.reduce is not None
    wire = gradient if sparse or complex_mixed else wire_dtype(policy, gradient)
    numels = [spec.numel for spec in group]
    flags = not policy.fail_on_unused
    return PlannedBucket(
        params=tuple(spec.index for spec in group),
        layout=dense_layout(numels) if policy.hooked else flat_layout(numels, world_size, flags),
        wire=wire,
        views=policy.views and wire == gradient,
        sparse=sparse,
    )
