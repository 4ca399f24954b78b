"""Kinds of an optimizer's parameters: those of one kind lie in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from fastsync.reducer.engine import Engine

__all__ = ["Kind", "bucket_numbers", "by_kind"]

_BUFFER = 8 << 20  # bytes


class Kind(NamedTuple):
    """Properties that parameters in one buffer share; `bucket`: None where it does not matter."""

    dtype: torch.dtype
    device: torch.device
    whole: bool
    bucket: int | None


def by_kind(
    params: Sequence[torch.Tensor], engine: Engine, whole: bool, buckets: Mapping[int, int]
) -> dict[Kind, list[torch.Tensor]]:
    """Group parameters that can lie in one buffer and be cut alike, and whose gradients come
    together.

    Args:
        params: some of the engine's.
        whole: each has one owner. Those with sparse gradients always have.
        buckets: see `bucket_numbers`.
    """
    index_of = {id(each.tensor): index for index, each in enumerate(engine.params)}
    kinds: dict[Kind, list[torch.Tensor]] = {}
    for param in params:
        index = index_of[id(param)]
        alone = whole or engine.params[index].sparse
        bucket = None if alone else buckets.get(index)
        kinds.setdefault(Kind(param.dtype, param.device, alone, bucket), []).append(param)
    return kinds


def bucket_numbers(engine: Engine) -> dict[int, int]:
    """Return, by parameter index, the number of the bucket that its gradient travels in.

    Where ranks may die, of a buffer that depends on nothing else: plans follow the number of ranks,
    and one may take an optimizer over before a death, another after it.
    """
    if engine.policy.elastic is not None:
        sizes = [param.tensor.nbytes for param in engine.params]
        ends = enumerate(accumulate(sizes))
        return {index: (end - sizes[index]) // _BUFFER for index, end in ends}
    buckets = enumerate(engine.plan.buckets)
    return {index: number for number, bucket in buckets for index in bucket.params}
