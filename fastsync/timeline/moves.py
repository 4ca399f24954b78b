"""Collectives of units: what was recorded of each, and the spans of time that they fill.

Pure, as data.py is. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Event = tuple[int, str, int, int, int]  # step, mark, bucket, unit or plan, bytes, nanoseconds
Span = tuple[int, int]

# A gather of parameters, a reduction of gradients, a sum over ranks that have the same shares, and
# an average of parameters (`sync=`), whose units are fragments.
KINDS = ("gather", "reduction", "sum", "average")


@dataclass(frozen=True)
class UnitInfo:
    """A unit, or those of its parameters that are of one dtype.

    Attributes:
        name: of its modules in the model; "root" for what belongs to the outermost one.
        parameters: names, in the order in which they lie.
        bytes: of the whole parameters, as modules compute with them.
        dtype: that they are then of.
    """

    name: str
    parameters: tuple[str, ...]
    bytes: int
    dtype: str

    @property
    def words(self) -> str:
        """Description for errors."""
        first, last, count = self.parameters[0], self.parameters[-1], len(self.parameters)
        held = (
            f"parameter {first!r}" if count == 1 else f"{count} parameters, {first!r} to {last!r}"
        )
        return f"unit {self.name!r} ({held}, {size_text(self.bytes)})"


def size_text(amount: float) -> str:
    """Format an amount of bytes for readers."""
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


@dataclass(frozen=True)
class Move:
    """One collective of a unit in one step of one rank.

    Attributes:
        unit: its number.
        kind: one of `KINDS`.
        turn: how many of its kind the unit had in this step before.
        started: handed to the backend.
        done: completed, whether or not the computation waits for it.
        wanted: the computation could not go on without it.
        arrived: the computation goes on.
        bytes: that left this rank.
    """

    unit: int
    kind: str
    turn: int
    started: int
    done: int
    wanted: int
    arrived: int
    bytes: int

    @property
    def exposed(self) -> Span:
        """When the computation stood still for it."""
        return self.wanted, self.arrived


def moves_of(events: Iterable[Event]) -> tuple[Move, ...]:
    """Return a step's collectives that the computation has waited for, in the order of starts."""
    begun: list[dict[str, Any]] = []
    latest: dict[tuple[int, str], dict[str, Any]] = {}
    for _, mark, unit, size, time in events:
        kind, _, what = mark.rpartition("_")
        if kind not in KINDS:
            continue
        if what == "started":
            turn = latest[unit, kind]["turn"] + 1 if (unit, kind) in latest else 0
            latest[unit, kind] = {"unit": unit, "kind": kind, "turn": turn, "bytes": size}
            begun.append(latest[unit, kind])
        if (unit, kind) in latest:
            latest[unit, kind][what] = time
    waited = [marks for marks in begun if {"wanted", "arrived"} <= marks.keys()]
    for marks in waited:  # collectives that Python waits for say only that they have arrived
        marks["done"] = min(marks.get("done", marks["arrived"]), marks["arrived"])
    return tuple(Move(**marks) for marks in waited)


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same times, as spans that do not touch, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def common(some: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the spans that lie within both."""
    theirs = union(others)
    both = [(max(a, c), min(b, d)) for a, b in union(some) for c, d in theirs]
    return tuple((start, end) for start, end in both if start < end)


def length(spans: Sequence[Span]) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum(1e-9 * (end - start) for start, end in spans)
