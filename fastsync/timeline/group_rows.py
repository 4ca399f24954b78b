"""Times of a unit in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fastsync.timeline.data import RankStep
from fastsync.timeline.moves import Move, UnitInfo, length, union

__all__ = ["UnitTiming", "unit_timings"]


@dataclass(frozen=True)
class UnitTiming:
    """One unit; seconds of a step, medians over the recorded steps.

    Attributes:
        name: of its modules in the model; "root" for what belongs to the outermost one.
        bytes: of its whole parameters.
        gathering: in which gathers of its parameters were under way.
        gather_exposed: of waiting for them, with nothing to compute.
        reducing: in which its gradients were on their way.
        reduction_exposed: of waiting for these.
    """

    name: str
    bytes: int
    gathering: float
    gather_exposed: float
    reducing: float
    reduction_exposed: float


def unit_timings(units: Sequence[UnitInfo], steps: Sequence[RankStep]) -> Iterator[UnitTiming]:
    """Return the times of each unit, over at least one step."""
    for number, info in enumerate(units):
        moves = [[m for m in step.moves if m.unit == number] for step in steps]
        if any(m.kind == "average" for some in moves for m in some):
            moves = [some for some in moves if some]  # fragments travel in few steps
        gathers = [[m for m in some if m.kind == "gather"] for some in moves]
        gradients = [[m for m in some if m.kind != "gather"] for some in moves]
        yield UnitTiming(
            info.name,
            info.bytes,
            gathering=median(map(_under_way, gathers)),
            gather_exposed=median(map(_waited, gathers)),
            reducing=median(map(_under_way, gradients)),
            reduction_exposed=median(map(_waited, gradients)),
        )


def _under_way(moves: Sequence[Move]) -> float:
    return length(union((m.started, m.done) for m in moves))


def _waited(moves: Sequence[Move]) -> float:
    return length(union(m.exposed for m in moves))
