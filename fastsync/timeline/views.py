"""A recorded run as people look at it: a summary in text, a trace for Perfetto, and an HTML page.

The trace follows the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing read.
The page is one file without any reference to a network; its sources are in fastsync/timeline/page/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias

from fastsync.engine.pace import during
from fastsync.page import make_page
from fastsync.timeline.data import (
    BucketInfo,
    RankStep,
    Run,
    Straggler,
    by_step,
    find_straggler,
    launch_lag,
)
from fastsync.timeline.moves import KINDS, Move, length, size_text
from fastsync.timeline.units import UnitTiming, unit_timings

__all__ = ["Summary", "html_page", "perfetto_trace", "summarise", "summary_text"]

# What json.dumps takes.
Json: TypeAlias = dict[str, object]

_PAGE = Path(__file__).resolve().parent / "page"
_MS = 1e3
_MIB = 1 << 20
_NAME = 40  # characters of a unit's


@dataclass(frozen=True)
class RankSummary:
    """Medians over the steps of one rank, in seconds.

    Attributes:
        overlap: share of the communication that lies within backward, 0 to 1; with units, that is
            not exposed.
    """

    rank: int
    computing: float
    communicating: float
    exposed: float
    overlap: float


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers: medians over its steps, in seconds.

    Attributes:
        step: from the first rank's forward to the last rank's averages.
        exposed: of the rank with most of it, step by step.
        gather_exposed: the part of it that is waiting for units' parameters.
        overlap: share of the communication that lies within backward, or with units is not
            exposed; median of the ranks.
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
    ranks: tuple[RankSummary, ...]
    units: tuple[UnitTiming, ...]


def _length(steps: Sequence[RankStep]) -> float:
    return 1e-9 * (max(s.end for s in steps) - min(s.start for s in steps))


def _of_rank(rank: int, steps: Sequence[RankStep]) -> RankSummary:
    shares = [s.overlapped / s.communicating for s in steps if s.communicating > 0]
    return RankSummary(
        rank,
        computing=median(s.computing for s in steps),
        communicating=median(s.communicating for s in steps),
        exposed=median(s.exposed for s in steps),
        overlap=median(shares) if shares else 0.0,
    )


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
    per_rank = [
        _of_rank(record.rank, [ranks[i] for ranks in steps.values()])
        for i, record in enumerate(run.ranks)
    ]
    latest = list(steps.values())[-1][0]
    return Summary(
        steps=len(steps),
        step=median(_length(ranks) for ranks in steps.values()),
        computing=median(r.computing for r in per_rank),
        communicating=median(r.communicating for r in per_rank),
        exposed=median(max(s.exposed for s in ranks) for ranks in steps.values()),
        gather_exposed=median(
            length(max(ranks, key=lambda s: s.exposed).waits("gather")) for ranks in steps.values()
        ),
        overlap=median(r.overlap for r in per_rank),
        bytes=latest.bytes,
        buckets=len(latest.buckets),
        moves={kind: sum(m.kind == kind for m in latest.moves) for kind in KINDS},
        straggler=find_straggler(run, steps),
        clock_error=1e-9 * max(r.clock_error_ns for r in run.ranks),
        ranks=tuple(per_rank),
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
    for rank in s.ranks:
        lines.append(
            f"  {rank.rank:>4}  {rank.computing * _MS:8.2f} ms  {rank.communicating * _MS:10.2f} ms"
            f"  {rank.exposed * _MS:6.2f} ms  {rank.overlap:7.0%}"
        )
    if s.units:
        lines += _unit_lines(s.units)
    return "\n".join(lines)


def _lost_texts(run: Run) -> list[str]:
    """What was recorded, or should have been, and is not there."""
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
        info = _infos(run, step)[bucket.bucket]
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


def _infos(run: Run, step: RankStep) -> tuple[BucketInfo, ...]:
    return run.plans[step.plan - 1]


def html_page(run: Run) -> str:
    """The run as one HTML page that needs nothing else.

    Raises:
        ValueError: no step is complete on all ranks.
    """
    return make_page(_PAGE, "fastsync timeline", _page_data(run))


def _page_data(run: Run) -> Json:
    """What page.js reads; durations and times in nanoseconds, each step's from its own start."""
    summary = summarise(run)
    steps = by_step(run)
    straggler = summary.straggler and {
        **asdict(summary.straggler),
        "lag": 1e9 * summary.straggler.lag,
        "slow": during(summary.straggler.slow),
    }
    scaled = ("step", "computing", "communicating", "exposed", "gather_exposed", "clock_error")
    return {
        "model": run.model,
        "world_size": run.world_size,
        "backend": run.backend,
        "device": run.device,
        "torch": run.torch,
        "missing": run.missing,
        "lost": _lost_texts(run),
        "ranks": [record.rank for record in run.ranks],
        "plans": [[asdict(info) for info in plan] for plan in run.plans],
        "units": [asdict(info) for info in run.units],
        "summary": {
            **{name: 1e9 * getattr(summary, name) for name in scaled},
            "overlap": summary.overlap,
            "bytes": summary.bytes,
            "buckets": summary.buckets,
            "moves": summary.moves,
            "straggler": straggler,
            "typical": _typical(list(steps.values()), summary),
        },
        "steps": [_step_data(number, ranks) for number, ranks in steps.items()],
    }


def _typical(steps: Sequence[Sequence[RankStep]], summary: Summary) -> int:
    """The index of the step to show first: of median length, and with the straggler late in it."""
    straggler = summary.straggler
    lags = [launch_lag(ranks) for ranks in steps]
    fitting = [i for i, lag in enumerate(lags) if straggler and lag and lag[0] == straggler.rank]
    candidates = fitting or range(len(steps))
    return min(candidates, key=lambda i: abs(_length(steps[i]) - summary.step))


def _step_data(number: int, ranks: Sequence[RankStep]) -> Json:
    start = min(step.start for step in ranks)
    lag = launch_lag(ranks)
    return {
        "number": number,
        "plan": ranks[0].plan,
        "length": max(step.end for step in ranks) - start,
        "exposed": 1e9 * max(step.exposed for step in ranks),
        "lag": lag and {"rank": lag[0], "ns": 1e9 * lag[1]},
        "ranks": [_rank_data(step, start) for step in ranks],
    }


def _rank_data(step: RankStep, start: int) -> Json:
    return {
        "rank": step.rank,
        "forwards": [[a - start, b - start] for a, b in step.forwards],
        "backward": [step.backward_start - start, step.backward_end - start],
        "end": step.end - start,
        "accumulating": [[a - start, b - start] for a, b in step.accumulating],
        "exposures": [[a - start, b - start] for a, b in step.exposures],
        "moves": [_move_data(move, start) for move in step.moves],
        "buckets": [
            {
                "bucket": b.bucket,
                "ready": b.ready - start,
                "packed": b.packed - start,
                "launched": b.launched - start,
                "done": b.done - start,
                "bytes": b.bytes,
            }
            for b in step.buckets
        ],
    }


def _move_data(move: Move, start: int) -> Json:
    times = ("started", "done", "wanted", "arrived")
    return {**asdict(move), **{name: getattr(move, name) - start for name in times}}
