"""Statistics of synchronisation at run time, as one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from fastsync.reducer.reports import Counters, UnitCounters
from fastsync.reducer.step_timing import SlowRanks, StepTiming
from fastsync.timeline.data import Medians, RankStep, UnitTiming, unit_timings
from fastsync.timeline.moves import UnitInfo, size_text

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

    Counters start when the model is wrapped. Times are in seconds. Those from `step_time` to
    `scaling_efficiency` are medians over the steps that are recorded, the latest 50 at most;
    without `timeline=` they are None, because nothing records when a collective completes. `str()`
    gives a report, a line for each field.

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
        recorded_steps: how many steps those times are medians of.
        step_time: from the end of one synchronised backward to the end of the next, whatever lies
            in between.
        compute_time: forward and backward.
        communication_time: with at least one collective under way.
        exposed_time: from the last gradient to the last average, and of waiting for units: what
            synchronising adds to a step.
        overlap: share of the communication that lies within backward, 0 to 1; with units, that is
            not exposed.
        bucket_times: of each bucket of the current plan.
        unit_times: of each unit.
        scaling_efficiency: step time of a single rank / step_time, 1 being perfect; needs
            `one_rank_step`.
        straggler: whom the others wait for, over 50 steps; the same on every rank. Known without
            `timeline=`, on CPUs; None if no rank keeps the others waiting, and with units.
        network_time: of a step that even the rank that waits least waits, so for the network.
        rounds: averages of parameters, or of fragments of them, with `sync`.
        round_bytes: that left this rank for them.
        round_seconds: host time spent waiting for them.
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
    overlap: float | None = None
    bucket_times: tuple[BucketTiming, ...] | None = None
    unit_times: tuple[UnitTiming, ...] | None = None
    scaling_efficiency: float | None = None
    straggler: SlowRanks | None = None
    network_time: float | None = None
    rounds: int = 0
    round_bytes: int = 0
    round_seconds: float = 0.0

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def __str__(self) -> str:
        """A report: what is not zero, with units."""
        rows = [(name, _text(name, value)) for name, value in self.items() if value]
        if self.network_time is not None:
            rows.append(("waits for", str(self.straggler or "no rank")))
        if not self.recorded_steps:
            rows.append(("times", "not recorded; timeline=True or record_timeline() records them"))
        width = max(len(name) for name, _ in rows)
        lines = (f"  {name:<{width}}  {text}" for name, text in rows)
        return "\n".join((f"fastsync: {self.steps} synchronised steps", *lines))


def _text(name: str, value: object) -> str:
    """Return a figure with the unit that follows from its name."""
    if isinstance(value, tuple):
        return ", ".join(_text(name, each) for each in value)
    if isinstance(value, BucketTiming | UnitTiming):
        return " ".join(f"{k} {_text(k, v)}" for k, v in vars(value).items())
    if name.endswith("bytes") or name in ("buckets", "units"):
        return size_text(float(str(value)))
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0%}" if name in ("overlap", "scaling_efficiency") else f"{1e3 * value:.2f} ms"


_NAMES = tuple(field.name for field in fields(SyncStats))


def make_stats(
    counters: Counters,
    buckets: Sequence[int],
    recorded: Sequence[RankStep],
    one_rank_step: float | None,
    step_timing: StepTiming | None = None,
) -> SyncStats:
    """Put the statistics together.

    Args:
        counters: those of the C++ reducer.
        buckets: bytes of each bucket of the current plan.
        recorded: this rank's recorded steps, in order.
        one_rank_step: seconds of a step on a single rank.
        step_timing: of all ranks, where it is known.

    Raises:
        ValueError: `one_rank_step` is not positive, or there is nothing to compare it with.
    """
    base = SyncStats(**counters, buckets=tuple(buckets), recorded_steps=len(recorded))
    if step_timing is not None:
        base = replace(base, straggler=step_timing.slow, network_time=step_timing.network_time)
    stats = _with_times(base, recorded, one_rank_step)
    return replace(stats, bucket_times=_bucket_times(buckets, recorded)) if recorded else stats


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
    return replace(stats, unit_times=tuple(unit_timings(units, recorded))) if recorded else stats


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
    times = Medians.of(recorded)
    return replace(
        base,
        step_time=step_time,
        compute_time=times.computing,
        communication_time=times.communicating,
        exposed_time=times.exposed,
        overlap=times.overlap,
        scaling_efficiency=one_rank_step / step_time if one_rank_step and step_time else None,
    )


def _bucket_times(buckets: Sequence[int], recorded: Sequence[RankStep]) -> tuple[BucketTiming, ...]:
    """Times of the latest step's plan; earlier steps with another plan do not count."""
    plan = recorded[-1].plan
    seen = [b for step in recorded if step.plan == plan for b in step.buckets]
    timings = []
    for index, size in enumerate(buckets):
        if times := [b for b in seen if b.bucket == index]:
            waiting = _NS * median(b.packed - b.ready for b in times)
            communicating = _NS * median(b.done - b.launched for b in times)
            timings.append(BucketTiming(size, waiting, communicating))
    return tuple(timings)
