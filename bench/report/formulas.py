"""Figures that need no measurement: the bytes that each rank has to send in a step, by wire format
(docs/wire.md), those that it holds, by stage of ZeRO (docs/zero.md), and the least time for which
communication can be exposed.

Bytes are without padding, flags and headers; counted bytes are slightly more.

[Note: The least exposed time]
Messages i = 1..n are ready at r_i after the start of a backward of length T, in this order, and the
link needs c_i for each, one after the other. Message i starts when it is ready and its predecessor
has arrived, so the last one arrives at

    F = max over i of (r_i + c_i + c_{i+1} + ... + c_n)

and at least max(0, F - T) of it is exposed. With single gradients as messages this is the
least for a model and a link: no choice of buckets can do better. With buckets as messages, ready
with their last gradients, it is the least for a plan. c_i is 2(N-1)/N times the bytes of the
message over the rate of the link; latency and the work of the processors are left aside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.common.text import render
from examples.common.variants import Variant
from fastsync.wire.formats import Wire, make_codec


def bus_factor(world: int) -> float:
    """Return the bytes that each rank sends in an all-reduce, per byte of its tensor: 2(N-1)/N."""
    return 2 * (world - 1) / world


def variant_bytes(
    variant: Variant, shapes: Sequence[Sequence[int]], world: int, device: torch.device
) -> float | None:
    """Return the bytes that a rank sends for fp32 gradients of these shapes; None: not known."""
    if variant.wire is not None:
        return wire_bytes(variant.wire, shapes, world, device)
    if variant.bits is None:
        return None
    return bus_factor(world) * sum(map(math.prod, shapes)) * variant.bits / 8


def wire_bytes(
    wire: str, shapes: Sequence[Sequence[int]], world: int, device: torch.device
) -> float:
    """Return the same, where FastDDP sends them as `wire`, any name that it takes.

    Every rank sends a part to each of the others and, once summed, its own part to all of them; in
    the gather form it sends all it has to all others.
    """
    codec = make_codec(wire)
    elements = sum(map(math.prod, shapes))
    full = -(-elements // codec.block) * codec.block
    payload = codec.coded_bytes(full) * elements / full
    gathers = Wire(wire).form_for(codec, world, device) == "gather"
    return float(payload * (world - 1 if gathers else bus_factor(world)))


@dataclass(frozen=True)
class Held:
    """Bytes per parameter: of itself, its gradient, the optimizer's state, and its master weight.

    Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models". A
    common table has 210 GB for stage 2 of 70 billion bf16 parameters on 8 ranks: 2 + 8/8 = 3.00
    bytes each, which leaves out the shard of the gradients. 2 + (2 + 8)/8 = 3.25 make 227.5 GB.
    """

    parameter: float
    gradient: float
    state: float
    master: float = 0.0

    def per_rank(self, stage: int, world: int) -> float:
        """Return the bytes per parameter on each of `world` ranks, sharded as `stage` says."""
        of_state, of_gradient, of_parameter = (1 / world if stage >= s else 1.0 for s in (1, 2, 3))
        states = (self.state + self.master) * of_state
        return self.parameter * of_parameter + self.gradient * of_gradient + states


HELD = {
    "fp32": Held(4, 4, 8),
    "bf16, states in fp32": Held(2, 2, 8),
    "bf16, states and master weights in fp32": Held(2, 2, 8, 4),
}


WORLD, STAGES = 8, range(4)


def held_table() -> str:
    """Return a table of the bytes on a rank with Adam, by precision and stage."""
    headers = (f"Adam, bytes per parameter on {WORLD} ranks", *(f"stage {s}" for s in STAGES))
    rows = [
        (name, *(f"{held.per_rank(stage, WORLD):.2f}" for stage in STAGES))
        for name, held in HELD.items()
    ]
    return render(headers, rows, True)


def finish(ready: Sequence[float], durations: Sequence[float]) -> float:
    """Return when the last of the messages is through: F above; 0 where there is none.

    Args:
        ready: when each message is ready, in the order in which they are sent.
        durations: what the link needs for each; both in seconds.
    """
    through = 0.0
    for at, duration in zip(ready, durations, strict=True):
        through = max(through, at) + duration
    return through


def least_exposed(ready: Sequence[float], durations: Sequence[float], backward: float) -> float:
    """Return the least time that the last message takes after the backward, in seconds."""
    return max(0.0, finish(ready, durations) - backward)


def bucketed(
    ready: Sequence[float], durations: Sequence[float], buckets: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Return the ready times and durations of buckets, each a list of message numbers."""
    return (
        [max(ready[i] for i in bucket) for bucket in buckets],
        [sum(durations[i] for i in bucket) for bucket in buckets],
    )
