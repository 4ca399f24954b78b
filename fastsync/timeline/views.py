"""A recorded run as a summary in text, and as a trace for Perfetto.

The trace follows the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from fastsync.reducer.step_timing import SlowRanks
from fastsync.timeline.data import (
    Medians,
    RankStep,
    Run,
    UnitTiming,
    by_step,
    find_slow_ranks,
    unit_timings,
)
from fastsync.timeline.moves import KINDS, Span, length, size_text

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
        exposed: of the rank with most of it, step by step; `medians` are of all ranks.
        gather_exposed: the part of it that is waiting for units' parameters.
        bytes: handed to the backend by a rank in a step; with units, sent.
        moves: gathers and reductions of units.
        clock_error: how far the ranks' clocks may differ from rank 0's.
    """

    steps: int
    step: float
    exposed: float
    gather_exposed: float
    medians: Medians
    bytes: int
    buckets: int
    moves: dict[str, int]
    straggler: SlowRanks | None
    clock_error: float
    units: tuple[UnitTiming, ...]


def step_length(steps: Sequence[RankStep]) -> float:
    """Return the seconds from the first rank's forward to the last rank's averages."""
    return 1e-9 * (max(s.last for s in steps) - min(s.start for s in steps))


def summarise(run: Run) -> Summary:
    """Compute the summary.

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
    every = [step for ranks in steps.values() for step in ranks]
    # With sync= many steps send nothing, or only gradients.
    latest = max((ranks[0] for ranks in reversed(steps.values())), key=lambda s: len(s.moves))
    return Summary(
        steps=len(steps),
        step=median(step_length(ranks) for ranks in steps.values()),
        exposed=median(max(s.exposed for s in ranks) for ranks in steps.values()),
        gather_exposed=median(
            length(max(ranks, key=lambda s: s.exposed).waits("gather")) for ranks in steps.values()
        ),
        medians=Medians.of(every),
        bytes=latest.bytes,
        buckets=len(latest.buckets),
        moves={kind: sum(m.kind == kind for m in latest.moves) for kind in KINDS},
        straggler=find_slow_ranks(steps),
        clock_error=1e-9 * max(r.clock_error_ns for r in run.ranks),
        units=tuple(unit_timings(run.units, every)),
    )


def summary_text(run: Run) -> str:
    """Return the summary as lines of a terminal."""
    s = summarise(run)
    lines = [
        f"{run.model}, {run.world_size} ranks, {run.backend} on {run.device}, {s.steps} steps",
        "",
        f"  step           {s.step * _MS:9.2f} ms",
        f"  computation    {s.medians.computing * _MS:9.2f} ms   forward and backward",
        f"  communication  {s.medians.communicating * _MS:9.2f} ms   {_communication_text(s)}",
        f"  exposed        {s.exposed * _MS:9.2f} ms   {_exposed_text(s)}",
        f"  straggler      {s.straggler or 'none: no rank keeps the others waiting'}",
    ]
    if s.clock_error:
        lines.append(f"  clocks         aligned within ±{s.clock_error * _MS:.3f} ms")
    if run.missing:
        lines.append(
            f"  missing        nothing recorded of rank {', '.join(map(str, run.missing))}"
        )
    lines += [f"  incomplete     {text}" for text in _lost_texts(run)]
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
    overlap = s.medians.overlap or 0.0
    if not s.units:
        return f"{s.bytes / _MIB:.1f} MiB in {s.buckets} buckets; {overlap:.0%} within backward"
    counted = ((kind, count) for kind, count in s.moves.items() if count)
    counts = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counted)
    return f"{s.bytes / _MIB:.1f} MiB in {counts}; {overlap:.0%} behind computation"


def _exposed_text(s: Summary) -> str:
    share = f"{s.exposed / s.step:.0%} of the step"
    return f"{share}; {s.gather_exposed * _MS:.2f} ms of it waits for gathers" if s.units else share


def _unit_lines(units: Sequence[UnitTiming]) -> Iterator[str]:
    """Return a table of what each unit takes in a step."""
    width = min(_NAME, max(len(unit.name) for unit in units))
    yield ""
    yield f"  {'unit':<{width}}        size     gathers   exposed  reductions   exposed  (ms)"
    for unit in units:
        times = (unit.gathering, unit.gather_exposed, unit.reducing, unit.reduction_exposed)
        a, b, c, d = (1e3 * seconds for seconds in times)
        name = unit.name if len(unit.name) <= width else unit.name[: width - 3] + "..."
        size = size_text(unit.bytes)
        yield f"  {name:<{width}}  {size:>10}  {a:10.2f}{b:10.2f}  {c:10.2f}{d:10.2f}"


@dataclass(frozen=True)
class Bar:
    """Something that took time in a lane.

    Attributes:
        name: "forward", "backward", "exposed", "waiting", "all-reduce", or one of `KINDS`.
        facts: about a bucket or unit, by name.
        launch: key of a collective in `RankStep.launches`; None: it is none.
    """

    name: str
    span: Span
    facts: Json
    launch: tuple[str, int, int] | None = None


def lanes_of(run: Run, step: RankStep) -> Iterator[tuple[int, str, list[Bar]]]:
    """Number, title and bars of each lane: that of the computation, and one per bucket or unit."""
    passes = [("forward", span) for span in step.forwards]
    passes += [
        ("backward", s) for s in ((step.backward_start, step.backward_end), *step.accumulating)
    ]
    passes += [("exposed", span) for span in step.exposures]
    yield 0, "compute", [Bar(name, span, {}) for name, span in passes]
    for b in step.buckets:
        info = run.plans[step.plan - 1][b.bucket]
        facts: Json = {"bytes": b.bytes, "wire": info.wire}
        waiting = Bar("waiting", (b.ready, b.packed), facts)
        facts = {**facts, "parameters": list(info.parameters)}
        wire = Bar("all-reduce", (b.launched, b.done), facts, ("bucket", b.bucket, 0))
        yield b.bucket + 1, f"bucket {b.bucket}", [waiting, wire]
    for number in sorted({move.unit for move in step.moves}):
        unit, bars = run.units[number], []
        for m in (move for move in step.moves if move.unit == number):
            facts = {"bytes": m.bytes, "parameters": list(unit.parameters)}
            facts["exposed_ms"] = 1e-6 * (m.arrived - m.wanted)
            bars.append(Bar(m.kind, (m.started, m.done), facts, (m.kind, number, m.turn)))
        yield number + 1, f"unit {unit.name}", bars


def perfetto_trace(run: Run) -> Json:
    """Return the run in Chrome's Trace Event Format: a process per rank, a thread per lane."""
    steps = by_step(run)
    origin = min((s.start for ranks in steps.values() for s in ranks), default=0)
    events: list[Json] = []

    def name(kind: str, rank: int, thread: int, text: str) -> None:
        args = {"name": text}
        events.append({"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args})

    for record in run.ranks:
        name("process_name", record.rank, 0, f"rank {record.rank} ({record.host})")
    named: set[tuple[int, int]] = set()
    for step in (step for ranks in steps.values() for step in ranks):
        for number, title, bars in lanes_of(run, step):
            if (step.rank, number) not in named:
                named.add((step.rank, number))
                name("thread_name", step.rank, number, title)
            for bar in bars:
                start, end = bar.span
                times = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
                place = {"pid": step.rank, "tid": number}
                args = {"step": step.step, **bar.facts}
                events.append({"ph": "X", "name": bar.name, **place, **times, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
