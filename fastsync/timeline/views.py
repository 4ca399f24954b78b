"""A recorded run as a summary in text, and as a trace for Perfetto.

The trace follows the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from fastsync.engine.pace import during
from fastsync.timeline.data import Medians, RankStep, Run, Straggler, by_step, find_straggler
from fastsync.timeline.moves import KINDS, length, size_text
from fastsync.timeline.units import UnitTiming, unit_timings

__all__ = ["Summary", "perfetto_trace", "step_length", "summarise", "summary_text"]

# What json.dumps takes.
Json: TypeAlias = dict[str, object]

_MS = 1e3
_MIB = 1 << 20
_NAME = 40  # characters of a unit's


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers: medians over its steps, in seconds.

    Attributes:
        step: from the first rank's forward to the last rank's averages.
        exposed: of the rank with most of it, step by step.
        gather_exposed: the part of it that is waiting for units' parameters.
        overlap: median of the ranks'.
        bytes: handed to the backend by a rank in a step; with units, sent.
        moves: gathers and reductions of units.
        clock_error: how far the ranks' clocks may differ from rank 0's.
    """

    steps: int
    step: float
    computing: float
    communicating: float
    exposed: float
    gather_exposed: float
    overlap: float
    bytes: int
    buckets: int
    moves: dict[str, int]
    straggler: Straggler | None
    clock_error: float
    ranks: dict[int, Medians]
    units: tuple[UnitTiming, ...]


def step_length(steps: Sequence[RankStep]) -> float:
    """Seconds from the first rank's forward to the last rank's averages."""
    return 1e-9 * (max(s.end for s in steps) - min(s.start for s in steps))


def summarise(run: Run) -> Summary:
    """Computes the summary.

    Raises:
        ValueError: no step is complete on all ranks.
    """
    steps = by_step(run)
    if not steps:
        raise ValueError(
            "the recording holds no step that is complete on every rank: train for more steps "
            "than it skips, and keep its capacity above 5 marks a step and 4 a bucket, gather or "
            "reduction"
        )
    per_rank = {
        record.rank: Medians.of([ranks[i] for ranks in steps.values()])
        for i, record in enumerate(run.ranks)
    }
    latest = list(steps.values())[-1][0]
    return Summary(
        steps=len(steps),
        step=median(step_length(ranks) for ranks in steps.values()),
        computing=median(r.computing for r in per_rank.values()),
        communicating=median(r.communicating for r in per_rank.values()),
        exposed=median(max(s.exposed for s in ranks) for ranks in steps.values()),
        gather_exposed=median(
            length(max(ranks, key=lambda s: s.exposed).waits("gather")) for ranks in steps.values()
        ),
        overlap=median(r.overlap or 0.0 for r in per_rank.values()),
        bytes=latest.bytes,
        buckets=len(latest.buckets),
        moves={kind: sum(m.kind == kind for m in latest.moves) for kind in KINDS},
        straggler=find_straggler(run, steps),
        clock_error=1e-9 * max(r.clock_error_ns for r in run.ranks),
        ranks=per_rank,
        units=tuple(unit_timings(run.units, [s for ranks in steps.values() for s in ranks])),
    )


def summary_text(run: Run) -> str:
    """The summary as lines of a terminal."""
    s = summarise(run)
    lines = [
        f"{run.model}, {run.world_size} ranks, {run.backend} on {run.device}, {s.steps} steps",
        "",
        f"  step           {s.step * _MS:9.2f} ms",
        f"  computation    {s.computing * _MS:9.2f} ms   forward and backward",
        f"  communication  {s.communicating * _MS:9.2f} ms   {_communication_text(s)}",
        f"  exposed        {s.exposed * _MS:9.2f} ms   {_exposed_text(s)}",
        f"  straggler      {_straggler_text(s)}",
    ]
    if s.clock_error:
        lines.append(f"  clocks         aligned within ±{s.clock_error * _MS:.3f} ms")
    if run.missing:
        lines.append(
            f"  missing        nothing recorded of rank {', '.join(map(str, run.missing))}"
        )
    lines += [f"  incomplete     {text}" for text in _lost_texts(run)]
    lines += ["", "  rank  computation  communication    exposed  overlap"]
    for rank, of in s.ranks.items():
        lines.append(
            f"  {rank:>4}  {of.computing * _MS:8.2f} ms  {of.communicating * _MS:10.2f} ms"
            f"  {of.exposed * _MS:6.2f} ms  {of.overlap or 0.0:7.0%}"
        )
    if s.units:
        lines += _unit_lines(s.units)
    return "\n".join(lines)


def _lost_texts(run: Run) -> list[str]:
    """Marks that were recorded, or should have been, and are not there."""
    found = []
    for record in run.ranks:
        if record.dropped:
            found.append(f"the first {record.dropped} marks of rank {record.rank} were overwritten")
        if record.unfinished:
            late = f"{record.unfinished} marks of rank {record.rank}"
            found.append(f"{late} lack: its device had not come to them")
    return found


def _communication_text(s: Summary) -> str:
    if not s.units:
        return f"{s.bytes / _MIB:.1f} MiB in {s.buckets} buckets; {s.overlap:.0%} within backward"
    counted = ((kind, count) for kind, count in s.moves.items() if count)
    counts = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counted)
    return f"{s.bytes / _MIB:.1f} MiB in {counts}; {s.overlap:.0%} behind computation"


def _exposed_text(s: Summary) -> str:
    share = f"{s.exposed / s.step:.0%} of the step"
    return f"{share}; {s.gather_exposed * _MS:.2f} ms of it waits for gathers" if s.units else share


def _unit_lines(units: Sequence[UnitTiming]) -> Iterator[str]:
    """A table of what each unit takes in a step."""
    width = min(_NAME, max(len(unit.name) for unit in units))
    yield ""
    yield f"  {'unit':<{width}}        size     gathers   exposed  reductions   exposed  (ms)"
    for unit in units:
        times = (unit.gathering, unit.gather_exposed, unit.reducing, unit.reduction_exposed)
        a, b, c, d = (1e3 * seconds for seconds in times)
        name = unit.name if len(unit.name) <= width else unit.name[: width - 3] + "..."
        size = size_text(unit.bytes)
        yield f"  {name:<{width}}  {size:>10}  {a:10.2f}{b:10.2f}  {c:10.2f}{d:10.2f}"


def _straggler_text(summary: Summary) -> str:
    straggler = summary.straggler
    if straggler is None:
        return "none: no rank keeps the others waiting"
    return (
        f"rank {straggler.rank} launches last in {straggler.late_steps} of {straggler.steps} "
        f"steps, {straggler.lag * _MS:.2f} ms after the others; it is slow {during(straggler.slow)}"
    )


def perfetto_trace(run: Run) -> Json:
    """The run in Chrome's Trace Event Format: a process per rank, a thread per lane."""
    steps = by_step(run)
    origin = min((s.start for ranks in steps.values() for s in ranks), default=0)
    events: list[Json] = []
    for record in run.ranks:
        events.append(_name("process_name", record.rank, 0, f"rank {record.rank} ({record.host})"))
        events.append(_name("thread_name", record.rank, 0, "compute"))
    named: set[tuple[int, int]] = set()
    for ranks in steps.values():
        for step in ranks:
            events += _compute_slices(step, origin)
            for index, slices in _bucket_slices(run, step, origin):
                if (step.rank, index) not in named:
                    named.add((step.rank, index))
                    events.append(_name("thread_name", step.rank, index + 1, f"bucket {index}"))
                events += slices
            for number in sorted({m.unit for m in step.moves}):
                if (step.rank, number) not in named:
                    named.add((step.rank, number))
                    title = f"unit {run.units[number].name}"
                    events.append(_name("thread_name", step.rank, number + 1, title))
            events += _unit_slices(run, step, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, rank: int, thread: int, text: str) -> Json:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": text}}


def _slice(
    name: str, place: tuple[int, int], span: tuple[int, int], origin: int, **args: object
) -> Json:
    pid, tid = place
    start, end = span
    times = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": args}


def _compute_slices(step: RankStep, origin: int) -> list[Json]:
    place = (step.rank, 0)
    spans = [("forward", span) for span in step.forwards]
    spans.append(("backward", (step.backward_start, step.backward_end)))
    spans += [("backward", span) for span in step.accumulating]
    spans += [("exposed", span) for span in step.exposures]
    return [_slice(name, place, span, origin, step=step.step) for name, span in spans]


def _bucket_slices(run: Run, step: RankStep, origin: int) -> Iterator[tuple[int, list[Json]]]:
    for bucket in step.buckets:
        info = run.plans[step.plan - 1][bucket.bucket]
        args = {"step": step.step, "bytes": bucket.bytes, "wire": info.wire}
        place = (step.rank, bucket.bucket + 1)
        whole = {**args, "parameters": list(info.parameters)}
        yield (
            bucket.bucket,
            [
                _slice("waiting", place, (bucket.ready, bucket.packed), origin, **args),
                _slice("all-reduce", place, (bucket.launched, bucket.done), origin, **whole),
            ],
        )


def _unit_slices(run: Run, step: RankStep, origin: int) -> Iterator[Json]:
    for move in step.moves:
        info = run.units[move.unit]
        args = {"step": step.step, "bytes": move.bytes, "parameters": list(info.parameters)}
        waited = 1e-6 * (move.arrived - move.wanted)
        place, span = (step.rank, move.unit + 1), (move.started, move.done)
        yield _slice(move.kind, place, span, origin, **args, exposed_ms=waited)
