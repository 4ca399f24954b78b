"""A recorded run: what every rank's buckets and units did and when, and what follows from it.

Pure: reads and writes JSON, needs neither the extension nor a process group. Times are nanoseconds
on rank 0's steady clock; durations are seconds.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fastsync.reducer.step_timing import SlowRanks, step_timing_of
from fastsync.timeline.moves import (
    Event,
    Move,
    Span,
    UnitInfo,
    common,
    length,
    moves_of,
    union,
)

FORMAT = "fastsync timeline"
VERSION = 3
_NS = 1e-9


@dataclass(frozen=True)
class BucketInfo:
    """A bucket of a plan.

    Attributes:
        parameters: names, in slot order.
        bytes: of the flat buffer, as it is handed to the backend.
        wire: the dtype it travels in.
    """

    parameters: tuple[str, ...]
    bytes: int
    wire: str


@dataclass(frozen=True)
class RankRecord:
    """The recording of one rank.

    Attributes:
        clock_error_ns: how far its times may be off rank 0's clock.
        dropped: marks that the ring had overwritten.
        events: (step, mark, bucket, unit or plan, bytes, time).
        unfinished: marks that the device had not come to when the others were written.
    """

    rank: int
    host: str
    clock_error_ns: int
    dropped: int
    events: tuple[Event, ...]
    unfinished: int = 0

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> RankRecord:
        """Return the record from entries that JSON has carried."""
        return cls(
            **{**entries, "events": tuple((s, m, i, b, t) for s, m, i, b, t in entries["events"])}
        )


@dataclass(frozen=True)
class Run:
    """A recording of all ranks.

    Attributes:
        plans: the buckets of each plan; a step's marks count plans from 1.
        missing: ranks whose marks could not be had.
        units: with zero=3 and fully_shard, which have no buckets; marks count them from 0.
    """

    model: str
    world_size: int
    backend: str
    device: str
    torch: str
    plans: tuple[tuple[BucketInfo, ...], ...]
    ranks: tuple[RankRecord, ...]
    missing: tuple[int, ...] = ()
    units: tuple[UnitInfo, ...] = ()

    def dump(self, path: Path) -> None:
        """Write the run as JSON; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def load(path: Path) -> Run:
    """Read a run.

    Raises:
        ValueError: the file is no recorded run, or of another version.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a timeline that fastsync has recorded")
    if (version := document.pop("version", None)) != VERSION:
        raise ValueError(f"{path} has format version {version}; this fastsync reads {VERSION}")
    try:
        return _run_of(document)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _run_of(document: Mapping[str, Any]) -> Run:
    fields = dict(document)
    plans, ranks, units = (fields.pop(name) for name in ("plans", "ranks", "units"))
    return Run(
        **{**fields, "missing": tuple(fields["missing"])},
        plans=tuple(
            tuple(BucketInfo(tuple(b["parameters"]), b["bytes"], b["wire"]) for b in plan)
            for plan in plans
        ),
        ranks=tuple(map(RankRecord.of, ranks)),
        units=tuple(UnitInfo(**{**u, "parameters": tuple(u["parameters"])}) for u in units),
    )


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step of one rank."""

    bucket: int
    ready: int
    packed: int
    launched: int
    done: int
    bytes: int


@dataclass(frozen=True)
class RankStep:
    """One synchronised step of one rank, with everything that was recorded about it.

    Attributes:
        plan: how many plans had been installed; index of its plan plus 1.
        forwards: start and end of each forward that belongs to it.
        backward_start, backward_end: of the gradients' computation.
        end: all averages of gradients are there; the end of the optimizer's step, where they stay
            local (`sync`).
        moves: collectives of units.
        accumulating: start and end of each backward before that one that sent nothing.
    """

    rank: int
    step: int
    plan: int
    forwards: tuple[tuple[int, int], ...]
    backward_start: int
    backward_end: int
    end: int
    buckets: tuple[BucketTimes, ...]
    moves: tuple[Move, ...] = ()
    accumulating: tuple[Span, ...] = ()

    @property
    def start(self) -> int:
        return self.forwards[0][0] if self.forwards else self.backward_start

    @property
    def computing(self) -> float:
        """Seconds of forward and backward, without those in which they waited for units."""
        spans = union((*self.forwards, *self.accumulating, self._backward))
        return length(spans) - length(common(spans, self.waits()))

    def waits(self, *kinds: str) -> tuple[Span, ...]:
        """Return when the computation waited for units; for transfers of some `kinds`, if given."""
        moves = (m for m in self.moves if not kinds or m.kind in kinds)
        return union(move.exposed for move in moves)

    @property
    def exposures(self) -> tuple[Span, ...]:
        """When averages, or parameters, were missing and nothing was left to compute."""
        gradients = self.buckets or any(m.kind != "average" for m in self.moves)
        last = [(self.backward_end, self.end)] if gradients else []
        return union((*last, *self.waits()))

    @property
    def last(self) -> int:
        """When the last collective that the step waits for was there: after its end with `sync`."""
        return max([self.end, *(move.arrived for move in self.moves)])

    @property
    def exposed(self) -> float:
        """Seconds of that: what synchronising costs."""
        return length(self.exposures)

    @property
    def busy(self) -> tuple[Span, ...]:
        """When at least one collective was under way."""
        buckets = ((b.launched, b.done) for b in self.buckets)
        return union((*buckets, *((m.started, m.done) for m in self.moves)))

    @property
    def communicating(self) -> float:
        """Seconds in which at least one collective was under way."""
        return length(self.busy)

    @property
    def overlapped(self) -> float:
        """Seconds of that which lie within backward; with units, which are not exposed."""
        if self.moves:
            return self.communicating - length(common(self.busy, self.exposures))
        return length(common(self.busy, [self._backward]))

    @property
    def bytes(self) -> int:
        """Handed to the backend; with units, sent."""
        return sum(b.bytes for b in self.buckets) + sum(m.bytes for m in self.moves)

    @property
    def launches(self) -> dict[tuple[str, int, int], int]:
        """When each collective was handed to the backend; the same keys on every rank."""
        buckets = {("bucket", b.bucket, 0): b.launched for b in self.buckets}
        return buckets | {(m.kind, m.unit, m.turn): m.started for m in self.moves}

    @property
    def _backward(self) -> Span:
        return self.backward_start, self.backward_end


@dataclass(frozen=True)
class Medians:
    """Medians over steps, in seconds.

    Attributes:
        communicating: with at least one collective under way.
        exposed: from the last gradient to the last average, and of waiting for units: what
            synchronising adds to a step.
        overlap: share of the communication that lies within backward, 0 to 1; with units, that is
            not exposed. None: nothing was communicated.
    """

    computing: float
    communicating: float
    exposed: float
    overlap: float | None

    @classmethod
    def of(cls, steps: Sequence[RankStep]) -> Medians:
        """Return the medians of at least one step."""
        shares = [s.overlapped / s.communicating for s in steps if s.communicating > 0]
        return cls(
            median(s.computing for s in steps),
            median(s.communicating for s in steps),
            median(s.exposed for s in steps),
            median(shares) if shares else None,
        )


def steps_of(rank: int, events: Iterable[Event]) -> dict[int, RankStep]:
    """Return the complete steps among a rank's marks, by number.

    A step is complete where its backward began, ended and was followed by all averages. A backward
    that failed leaves marks behind, under the number of the next one: the latest count.
    """
    grouped: dict[int, list[Event]] = {}
    for event in events:
        grouped.setdefault(event[0], []).append(event)
    steps = {number: _step_of(rank, number, marks) for number, marks in grouped.items()}
    return {number: step for number, step in steps.items() if step is not None}


def in_rounds(events: Iterable[Event], rounds: Sequence[Event]) -> list[Event]:
    """Return the marks of local steps with those of averages, numbered by optimizer steps.

    An average belongs to the step that waits for it, which may come after that which sends it.

    Args:
        events: those of forwards and backwards, whatever their numbers.
        rounds: those of averages, and "round_end" at the end of each optimizer step, with its
            number in place of bytes.
    """
    numbers = {time: size for _, mark, _, size, time in rounds if mark == "round_end"}
    ends, found, on_their_way = sorted(numbers), list[Event](), dict[int, Event]()
    for _, mark, index, size, time in sorted((*events, *rounds), key=lambda event: event[4]):
        place = bisect_left(ends, time)
        number = numbers[ends[place]] if place < len(ends) else numbers[ends[-1]] + 1
        event = (number, mark, index, size, time)
        if mark == "average_started":
            on_their_way[index] = event
            continue
        if mark == "average_wanted" and index in on_their_way:
            found.append((number, *on_their_way.pop(index)[1:]))
        found.append(event)
    return found


def _step_of(rank: int, number: int, events: Sequence[Event]) -> RankStep | None:
    latest = {mark: (index, time) for _, mark, index, _, time in events}
    end = latest.get("step_end", latest.get("round_end"))
    if end is None or not {"backward_start", "backward_end"} <= latest.keys():
        return None
    plan, start = latest["backward_start"]
    buckets: dict[int, dict[str, int]] = {}
    for _, mark, index, size, time in events:
        if mark in ("ready", "packed", "launched", "done"):
            buckets.setdefault(index, {})[mark] = time
        if mark == "launched":
            buckets[index]["bytes"] = size
    whole = (BucketTimes(n, **marks) for n, marks in sorted(buckets.items()) if len(marks) == 5)
    return RankStep(
        rank=rank,
        step=number,
        plan=plan,
        forwards=_spans(events, "forward"),
        backward_start=start,
        backward_end=latest["backward_end"][1],
        end=end[1],
        buckets=tuple(whole),
        moves=moves_of(events),
        accumulating=tuple(s for s in _spans(events, "backward") if s[1] <= start),
    )


def _spans(events: Sequence[Event], what: str) -> tuple[Span, ...]:
    """Return spans from every start of a forward or backward to its end."""
    spans = []
    start: int | None = None
    for _, mark, _, _, time in sorted(events, key=lambda event: event[4]):
        if mark == f"{what}_start":
            start = time
        elif mark == f"{what}_end" and start is not None:
            spans.append((start, time))
            start = None
    return tuple(spans)


class RankTimes(NamedTuple):
    """One rank's means over the steps: nanoseconds by activity; the last is waiting."""

    rank: int
    times: Sequence[int]


def find_slow_ranks(by_step: Mapping[int, Sequence[RankStep]]) -> SlowRanks | None:
    """Return the ranks that the others wait for, judged as at run time: by how long each waits.

    Steps count whose former step is there too.
    """
    spent: dict[int, list[tuple[float, ...]]] = {}
    for number, steps in by_step.items():
        for former, step in zip(by_step.get(number - 1, ()), steps, strict=False):
            busy = _activities(step, former.end)
            spent.setdefault(step.rank, []).append((*busy, step.end - former.end - sum(busy)))
    means = [
        RankTimes(rank, [round(sum(each) / len(times)) for each in zip(*times, strict=True)])
        for rank, times in spent.items()
    ]
    earliest = sorted(means, key=lambda each: each.times[-1])
    return step_timing_of(len(by_step), earliest, len(means)).slow if means else None


def _activities(step: RankStep, before: int) -> tuple[float, ...]:
    """Return the nanoseconds of each of `ACTIVITIES` in a step, without waiting.

    Args:
        before: when the step before it ended.
    """
    waits = step.waits()
    backward = union((*step.accumulating, (step.backward_start, step.backward_end)))
    forward = ((step.start, step.backward_start),)
    packing, sent = 0, 0
    for bucket in sorted(step.buckets, key=lambda b: b.launched):
        packing += bucket.launched - max(bucket.ready, sent)
        sent = bucket.launched
    return (
        step.start - before,
        (length(forward) - length(common(forward, union((*waits, *backward))))) / _NS,
        (length(backward) - length(common(backward, waits))) / _NS - packing,
        packing,
    )


def by_step(run: Run) -> dict[int, list[RankStep]]:
    """Return every step that all recorded ranks have in whole, in order; ranks in order."""
    per_rank = [steps_of(record.rank, record.events) for record in run.ranks]
    common = set.intersection(*(set(steps) for steps in per_rank)) if per_rank else set()
    return {number: [steps[number] for steps in per_rank] for number in sorted(common)}


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
