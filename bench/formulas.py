"""How many bytes each rank has to send in a step, by wire format: the formulas of docs/wire.md.

Without padding, flags and headers, of which whatever is counted has a little more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bench.wrappers import Variant

if TYPE_CHECKING:
    from fastsync.wire.formats import PowerSGD


def bus_factor(world: int) -> float:
    """What each rank sends in an all-reduce, per byte of its tensor: 2(N-1)/N."""
    return 2 * (world - 1) / world


def variant_bytes(
    variant: Variant, shapes: Sequence[Sequence[int]], world: int, device: torch.device
) -> float | None:
    """Bytes that a rank of `world` sends for fp32 gradients of these shapes; None: not known."""
    if variant.wire is not None:
        return wire_bytes(variant.wire, shapes, world, device)
    if variant.cost.bits is None:
        return None
    return bus_factor(world) * sum(map(math.prod, shapes)) * variant.cost.bits / 8


def wire_bytes(
    wire: str, shapes: Sequence[Sequence[int]], world: int, device: torch.device
) -> float:
    """The same, where FastDDP sends them as `wire`, any name that it takes.

    Every rank sends a part to each of the others and, once summed, its own part to all of them; in
    the gather form it sends all it has to all others. PowerSGD sums its factors, and what it does
    not compress, in all-reduces.
    """
    from fastsync.wire.formats import PowerSGD, Wire, make_codec

    codec = make_codec(wire)
    if isinstance(codec, PowerSGD):
        return bus_factor(world) * 4 * sum(_low_rank_numel(codec, shape) for shape in shapes)
    elements = sum(map(math.prod, shapes))
    whole = -(-elements // codec.block) * codec.block
    payload = codec.coded_bytes(whole) * elements / whole
    gathers = Wire(wire).form_for(codec, world, device) == "gather"
    return float(payload * (world - 1 if gathers else bus_factor(world)))


def _low_rank_numel(codec: PowerSGD, shape: Sequence[int]) -> int:
    """Elements of P and Q, or of the gradient where it is not compressed."""
    numel = math.prod(shape)
    rows = shape[0] if shape else 1
    cols = numel // max(1, rows)
    rank = codec.rank_for(rows, cols)
    return (rows + cols) * rank if rank else numel
