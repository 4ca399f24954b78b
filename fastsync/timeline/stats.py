"""Statistics of synchronisation at run time, as one object and as scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, Protocol

from fastsync.reducer.reports import Counters, UnitCounters
from fastsync.reducer.step_timing import Pace, SlowRanks
from fastsync.timeline.data import Medians, RankStep
from fastsync.timeline.group_rows import UnitTiming, unit_timings
from fastsync.timeline.moves import UnitInfo
from fastsync.timeline.moves import size_text as _size

__all__ = ["BucketTiming", "SyncStats", "log_to_tensorboard", "make_stats", "unit_stats"]

_NS = 1e-9


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of the current plan; medians over the recorded steps, in seconds.

    Attributes:
        bytes: of its flat buffer.
        waiting: from its last gradient to the packed buffer: its turn, and packing.
        communicating: from its launch to the collective's completion, queueing and waiting for
            slower ranks included.
    """

    bytes: int
    waiting: float
    communicating: float


@dataclass(frozen=True)
class SyncStats(Mapping[str, Any]):
    """Counters and times of one rank. Also a mapping from the names of its fields to their values.

    Counters start when the model is wrapped. Times are medians over the steps that are recorded,
    the latest 50 at most, in seconds; without `timeline=` they are None, because nothing
    records when a collective completes. `str()` gives a report of a few lines.

    Attributes:
        steps: synchronised backwards.
        plans: bucket plans installed.
        collectives: buckets handed to the backend; with units, gathers and reductions.
        bytes: handed to the backend; with units, sent.
        sent_bytes: that left this rank, where all-reduces are rings; none of those that the ranks
            of one machine read in memory, but with units.
        between_nodes_bytes: those of them that left its node, in the hierarchical form.
        residual_bytes: memory that error feedback holds.
        exposed_seconds: host time spent waiting for collectives, in all: at the end of backwards,
            and for units wherever they are waited for.
        buckets: bytes of each bucket of the current plan.
        gathers, reductions: those of units.
        gathered_bytes, reduced_bytes: what left this rank for them.
        units: bytes of each unit's whole parameters.
        recorded_steps: how many steps the times below are medians of.
        step_time: from the end of one synchronised backward to the end of the next, whatever lies
            in between.
        compute_time: forward and backward.
        communication_time: with at least one collective under way.
        exposed_time: from the last gradient to the last average, and of waiting for units: what
            synchronising adds to a step.
        communication_ratio: communication_time / compute_time.
        overlap: share of the communication that lies within backward, 0 to 1; with units, that is
            not exposed.
        bucket_times: of each bucket of the current plan.
        unit_times: of each unit.
        scaling_efficiency: step time of a single rank / step_time, 1 being perfect; needs
            `one_rank_step`.
        straggler: whom the others wait for, over 50 steps; the same on every rank. Known without
            `timeline=`, on CPUs; None if no rank keeps the others waiting, and with units.
        network_time: of a step that even the rank that waits least waits, so for the network.
    """

    steps: int
    plans: int
    collectives: int
    bytes: int
    sent_bytes: int
    between_nodes_bytes: int
    residual_bytes: int
    exposed_seconds: float
    buckets: tuple[int, ...]
    gathers: int = 0
    reductions: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    units: tuple[int, ...] = ()
    recorded_steps: int = 0
    step_time: float | None = None
    compute_time: float | None = None
    communication_time: float | None = None
    exposed_time: float | None = None
    communication_ratio: float | None = None
    overlap: float | None = None
    bucket_times: tuple[BucketTiming, ...] | None = None
    unit_times: tuple[UnitTiming, ...] | None = None
    scaling_efficiency: float | None = None
    straggler: SlowRanks | None = None
    network_time: float | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def __str__(self) -> str:
        """A report of a few lines, with units."""
        rows = [*_counter_rows(self), *_time_rows(self)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            [_headline(self), *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)]
        )


def _headline(stats: SyncStats) -> str:
    if stats.units:
        units = f"{_count(len(stats.units), 'unit')} of {_size(sum(stats.units))} in all"
        return f"fastsync: {_count(stats.steps, 'synchronised step')}, {units}"
    plans, buckets = _count(stats.plans, "plan"), _count(len(stats.buckets), "bucket")
    return (
        f"fastsync: {_count(stats.steps, 'synchronised step')}, {plans}, "
        f"{buckets} of {_size(sum(stats.buckets))} in all"
    )


def _unit_rows(stats: SyncStats) -> Iterator[tuple[str, str]]:
    steps = max(stats.steps, 1)
    for name, count, sent in (
        ("gathers", stats.gathers, stats.gathered_bytes),
        ("reductions", stats.reductions, stats.reduced_bytes),
    ):
        yield f"{name} per step", f"{count / steps:.1f}, for which {_size(sent / steps)} were sent"
    yield "sent by this rank", f"{_size(stats.sent_bytes / steps)} per step"
    yield "waited for units", f"{_time(stats.exposed_seconds / steps)} per step"


def _counter_rows(stats: SyncStats) -> Iterator[tuple[str, str]]:
    steps = max(stats.steps, 1)
    if stats.units:
        yield from _unit_rows(stats)
        return
    yield "collectives per step", f"{stats.collectives / steps:.1f}"
    yield "handed to the backend", f"{_size(stats.bytes / steps)} per step"
    yield "sent by this rank", f"{_size(stats.sent_bytes / steps)} per step"
    if stats.between_nodes_bytes:
        yield "sent between nodes", f"{_size(stats.between_nodes_bytes / steps)} per step"
    if stats.residual_bytes:
        yield "error feedback", f"{_size(stats.residual_bytes)} of memory"
    yield "waited after backward", f"{_time(stats.exposed_seconds / steps)} per step"
    if stats.network_time is not None:
        yield "waits for", str(stats.straggler or "no rank")
        yield "waits for the network", f"{_time(stats.network_time)} per step, on every rank"


def _time_rows(stats: SyncStats) -> Iterator[tuple[str, str]]:
    if not stats.recorded_steps:
        how = "FastDDP(..., timeline=True)" + (" or record_timeline()" if stats.units else "")
        yield "times", f"not recorded; {how} records them"
        return
    yield "times", f"medians of {_count(stats.recorded_steps, 'recorded step')}"
    for name, value in (("step", stats.step_time), ("forward, backward", stats.compute_time)):
        if value is not None:
            yield f"  {name}", _time(value)
    if stats.communication_time is not None:
        where = "behind computation" if stats.units else "within backward"
        inside = "" if stats.overlap is None else f", {stats.overlap:.0%} of it {where}"
        yield "  communication", _time(stats.communication_time) + inside
    if stats.exposed_time is not None:
        yield "  exposed", f"{_time(stats.exposed_time)} that synchronising adds to a step"
    if stats.scaling_efficiency is not None:
        yield "  scaling efficiency", f"{stats.scaling_efficiency:.0%} of a single rank's speed"
    for index, bucket in enumerate(stats.bucket_times or ()):
        yield (
            f"  bucket {index}",
            f"{_size(bucket.bytes)}: waited {_time(bucket.waiting)}, "
            f"communicated {_time(bucket.communicating)}",
        )
    for unit in stats.unit_times or ():
        yield (
            f"  unit {unit.name!r}",
            f"{_size(unit.bytes)}: gathered in {_time(unit.gathering)}, of which "
            f"{_time(unit.gather_exposed)} exposed; reduced in {_time(unit.reducing)}, of which "
            f"{_time(unit.reduction_exposed)} exposed",
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


_NAMES = tuple(field.name for field in fields(SyncStats))


def make_stats(
    counters: Counters,
    buckets: Sequence[int],
    recorded: Sequence[RankStep],
    one_rank_step: float | None,
    pace: Pace | None = None,
) -> SyncStats:
    """Put the statistics together.

    Args:
        counters: those of the C++ reducer.
        buckets: bytes of each bucket of the current plan.
        recorded: this rank's recorded steps, in order.
        one_rank_step: seconds of a step on a single rank.
        pace: of all ranks, where it is known.

    Raises:
        ValueError: `one_rank_step` is not positive, or there is nothing to compare it with.
    """
    base = SyncStats(**counters, buckets=tuple(buckets), recorded_steps=len(recorded))
    if pace is not None:
        base = replace(base, straggler=pace.slow, network_time=pace.network_time)
    stats = _with_times(base, recorded, one_rank_step)
    if not recorded:
        return stats
    return replace(stats, bucket_times=_bucket_times(buckets, recorded))


def unit_stats(
    counted: Sequence[UnitCounters],
    steps: int,
    units: Sequence[UnitInfo],
    recorded: Sequence[RankStep],
    one_rank_step: float | None,
) -> SyncStats:
    """Return the same of a model whose parameters are shared.

    Args:
        counted: by the ranks that units travel between.
        steps: synchronised backwards.

    Raises:
        ValueError: as `make_stats`.
    """
    gathered = sum(c["gathered_bytes"] for c in counted)
    reduced = sum(c["reduced_bytes"] for c in counted)
    sent = gathered + reduced + sum(c["summed_bytes"] for c in counted)
    gathers = sum(c["gathers"] for c in counted)
    reductions = sum(c["reductions"] for c in counted)
    base = SyncStats(
        steps=steps,
        plans=0,
        collectives=gathers + reductions,
        bytes=sent,
        sent_bytes=sent,
        between_nodes_bytes=0,
        residual_bytes=0,
        exposed_seconds=sum(c["waited_seconds"] for c in counted),
        buckets=(),
        gathers=gathers,
        reductions=reductions,
        gathered_bytes=gathered,
        reduced_bytes=reduced,
        units=tuple(unit.bytes for unit in units),
        recorded_steps=len(recorded),
    )
    stats = _with_times(base, recorded, one_rank_step)
    if not recorded:
        return stats
    return replace(stats, unit_times=tuple(unit_timings(units, recorded)))


def _with_times(
    base: SyncStats, recorded: Sequence[RankStep], one_rank_step: float | None
) -> SyncStats:
    """Return the statistics with the figures that follow from recorded steps."""
    if one_rank_step is not None and not one_rank_step > 0:
        raise ValueError(f"one_rank_step must be a positive number of seconds, not {one_rank_step}")
    ends = {step.step: step.end for step in recorded}
    lengths = [_NS * (ends[n] - ends[n - 1]) for n in ends if n - 1 in ends]
    if one_rank_step is not None and not lengths:
        raise ValueError(
            "scaling efficiency needs two recorded steps in a row: pass timeline=True to FastDDP, "
            "or call record_timeline(True) after fully_shard(), and train before you ask for it"
        )
    if not recorded:
        return base
    step_time = median(lengths) if lengths else None
    ratios = [step.communicating / step.computing for step in recorded if step.computing > 0]
    times = Medians.of(recorded)
    return replace(
        base,
        step_time=step_time,
        compute_time=times.computing,
        communication_time=times.communicating,
        exposed_time=times.exposed,
        communication_ratio=median(ratios) if ratios else None,
        overlap=times.overlap,
        scaling_efficiency=one_rank_step / step_time if one_rank_step and step_time else None,
    )


def _bucket_times(buckets: Sequence[int], recorded: Sequence[RankStep]) -> tuple[BucketTiming, ...]:
    """Times of the latest step's plan; earlier steps with another plan do not count."""
    plan = recorded[-1].plan
    seen = [b for step in recorded if step.plan == plan for b in step.buckets]
    timings = []
    for index, size in enumerate(buckets):
        times = [b for b in seen if b.bucket == index]
        if not times:
            continue
        waiting = _NS * median(b.packed - b.ready for b in times)
        timings.append(
            BucketTiming(size, waiting, _NS * median(b.done - b.launched for b in times))
        )
    return tuple(timings)


class Synchronised(Protocol):
    """A FastDDP, or another model with statistics."""

    def sync_stats(self) -> SyncStats:
        """Return the statistics, as `FastDDP.sync_stats`."""


class Writer(Protocol):
    """TensorBoard's SummaryWriter, or a similar writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Take one point of one curve."""


def log_to_tensorboard(
    model: Synchronised, writer: Writer, step: int | None = None, *, prefix: str = "fastsync"
) -> None:
    """Write the model's statistics as scalars; call it as often as you like to see a point.

    Args:
        model: a FastDDP, or the outermost module of fully_shard().
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`.
        step: the x coordinate; the number of synchronised backwards by default.
        prefix: of the tags: "fastsync/exposed_time", "fastsync/bucket_0/communicating", ...
    """
    stats = model.sync_stats()
    at = stats.steps if step is None else step
    for name, value in stats.items():
        if isinstance(value, int | float):
            writer.add_scalar(f"{prefix}/{name}", value, at)
    for index, timing in enumerate(stats.bucket_times or ()):
        writer.add_scalar(f"{prefix}/bucket_{index}/waiting", timing.waiting, at)
        writer.add_scalar(f"{prefix}/bucket_{index}/communicating", timing.communicating, at)
    for unit in stats.unit_times or ():
        for name in ("gathering", "gather_exposed", "reducing", "reduction_exposed"):
            writer.add_scalar(f"{prefix}/unit_{unit.name}/{name}", getattr(unit, name), at)
