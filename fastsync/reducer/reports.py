"""Counters and reports of the C++ engine, as Python reads them."""

from __future__ import annotations

from typing import TypedDict


class Counters(TypedDict):
    """Counters of `Reducer.stats()`: of this rank, since the reducer was made. See `SyncStats`."""

    steps: int
    plans: int
    collectives: int
    bytes: int
    sent_bytes: int
    between_nodes_bytes: int
    residual_bytes: int
    exposed_seconds: float


class StepReport(TypedDict):
    """Times of the last step, `Reducer.last_step()`: nanoseconds since the epoch, 0 where it got no
    so far.

    Keys:
        buckets: how many were sent.
        used: parameters that received a gradient, by index; empty before the first step.
        same_so_far: no step used other parameters than the one before.
        error: of the last call or backward that failed.
    """

    forward_start: int
    forward_end: int
    backward_start: int
    first_send: int
    backward_end: int
    received: int
    buckets: int
    used: list[bool]
    same_so_far: bool
    error: str


class UnitCounters(TypedDict):
    """Counters of `UnitPeers.stats()`: of this rank, since the model's units were connected.

    Keys:
        gathers, reductions: how many.
        gathered_bytes, reduced_bytes: sent by this rank for them.
        summed_bytes: sent to ranks that have the same shares.
        waited_seconds: what the host has waited for all of that.
    """

    gathers: int
    reductions: int
    gathered_bytes: int
    reduced_bytes: int
    summed_bytes: int
    waited_seconds: float
