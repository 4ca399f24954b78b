"""A recorded run as plans read it: what its ranks compute, and when their buckets or units move.

Medians over steps and ranks, but for a rank that is always slow: it is a straggler of plans, too.
What a rank computes leaves out the times in which it stood still for units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from fastsync.planner.compute import Compute
from fastsync.planner.simulate import Message
from fastsync.planner.unit_steps import UnitWork
from fastsync.timeline.data import RankStep, Run, by_step
from fastsync.timeline.moves import Move, Span, common, length

__all__ = ["Recorded", "Travel", "from_run", "travels"]

_NS = 1e-9
_CLEARLY = 0.05  # of the others' time, by which a rank is slow
_COLLECTIVES = {"gather": "all_gather", "reduction": "reduce_scatter"}


@dataclass(frozen=True)
class Recorded:
    """A recorded run.

    Attributes:
        messages: its buckets; `units`: its units, in the order of the backward. One is empty.
        world: ranks of it.
        jitter: standard deviation of a rank's computing time over its median.
        straggler: what one rank always takes, in times of the others'; 1: none does.
    """

    compute: Compute
    messages: tuple[Message, ...]
    world: int
    jitter: float
    units: tuple[UnitWork, ...] = ()
    straggler: float = 1.0


@dataclass(frozen=True)
class Travel:
    """A collective of a step.

    Attributes:
        kind: as `collective_seconds` calls it; `nbytes`: of the whole buffer.
    """

    kind: str
    nbytes: int
    seconds: float


def from_run(run: Run) -> Recorded:
    """From a timeline that FastDDP or `record_units` recorded.

    Raises:
        ValueError: it holds no complete step, or none with buckets or units, or replicas.
    """
    steps = by_step(run)
    if not steps:
        raise ValueError("the recording holds no step that is complete on every rank")
    every = [step for ranks in steps.values() for step in ranks]
    latest = [s for s in every if s.plan == every[-1].plan and (s.buckets or s.moves)]
    if not latest:
        raise ValueError(
            "the recording holds no step with buckets or units: was it made by one rank?"
        )
    _check_moves(latest)
    jitter = _jitter(latest)
    slow, straggler = _straggler(latest, jitter)
    latest = [step for step in latest if step.rank != slow]
    backward = median(_computed(s, [_backward(s)]) for s in latest)
    forward = median(_computed(s, s.forwards) for s in latest)
    messages = tuple(_message(latest, number) for number in range(len(latest[0].buckets)))
    source = (
        f"recorded: {len(steps)} steps of {run.model} on {run.world_size} ranks, "
        f"{run.backend} on {run.device}"
    )
    if slow is not None:
        source += f"; rank {slow} always took {straggler:.2f} times as long as the others"
    between = _between(list(steps.values()))
    ready = tuple(message.ready for message in messages)
    compute = Compute(forward, backward, ready, 0.0, between, source)
    units = tuple(_units(run, latest)) if run.units else ()
    return Recorded(compute, messages, run.world_size, jitter, units, straggler)


def _check_moves(steps: Sequence[RankStep]) -> None:
    if any(move.kind == "sum" for step in steps for move in step.moves):
        raise ValueError(
            "the recording holds sums over ranks that have the same shares (HSDP), which cannot be "
            "followed over other numbers of ranks; give --model, without --from"
        )


def _backward(step: RankStep) -> Span:
    return step.backward_start, step.backward_end


def _computed(step: RankStep, spans: Iterable[Span]) -> float:
    """Seconds of these in which the rank computed."""
    all_of = tuple(spans)
    return length(all_of) - length(common(all_of, step.waits()))


def _message(steps: Sequence[RankStep], number: int) -> Message:
    buckets = [(step, step.buckets[number]) for step in steps if number < len(step.buckets)]
    ready = median(_NS * (bucket.launched - step.backward_start) for step, bucket in buckets)
    return Message(ready, float(buckets[0][1].bytes))


def _between(steps: Sequence[Sequence[RankStep]]) -> float:
    """Seconds from a step's averages to the next forward, where steps follow each other."""
    gaps = [
        _NS * (later.start - earlier.end)
        for before, after in pairwise(steps)
        for earlier, later in zip(before, after, strict=True)
        if later.step == earlier.step + 1
    ]
    return max(0.0, median(gaps)) if gaps else 0.0


def _by_rank(steps: Sequence[RankStep]) -> dict[int, list[float]]:
    """Seconds of computing."""
    found: dict[int, list[float]] = {}
    for step in steps:
        found.setdefault(step.rank, []).append(step.computing)
    return found


def _jitter(steps: Sequence[RankStep]) -> float:
    """The median deviation from the rank's median, as the standard deviation of normal numbers."""
    apart = [
        abs(seconds / middle - 1)
        for times in _by_rank(steps).values()
        if (middle := median(times)) > 0
        for seconds in times
    ]
    return 1.4826 * median(apart) if apart else 0.0


def _straggler(steps: Sequence[RankStep], jitter: float) -> tuple[int | None, float]:
    """The rank that takes clearly longer than all others, and in times of theirs; None: nobody."""
    usual = {rank: median(times) for rank, times in _by_rank(steps).items()}
    slow = max(usual, key=usual.__getitem__)
    others = [seconds for rank, seconds in usual.items() if rank != slow]
    if not others or usual[slow] <= (1 + max(_CLEARLY, jitter)) * max(others):
        return None, 1.0
    return slow, usual[slow] / median(others)


# ---- units ------------------------------------------------------------------------------------


def _units(run: Run, steps: Sequence[RankStep]) -> Iterator[UnitWork]:
    """In the order in which their gradients leave; those without gradients come first."""
    forwards = [_by_unit(step, "gather", step.forwards[-1]) for step in steps if step.forwards]
    backwards = [_by_unit(step, "reduction", _backward(step)) for step in steps]
    sample = steps[-1]
    order = [m.unit for m in sample.moves if m.kind == "reduction"]
    others = [n for n in range(len(run.units)) if n not in order]
    for number in (*others, *dict.fromkeys(order)):
        gathers, reductions = (
            [m for m in sample.moves if m.unit == number and m.kind == kind]
            for kind in ("gather", "reduction")
        )
        if not gathers:
            continue
        again = any(m.wanted >= sample.backward_start for m in gathers)
        yield UnitWork(
            forward=_median_of(forwards, number),
            backward=_median_of(backwards, number),
            nbytes=_whole(gathers[0], run),
            travelling=_whole(reductions[-1], run) if reductions else 0.0,
            stays=not again,
        )


def _median_of(passes: Sequence[dict[int, float]], unit: int) -> float:
    return median(seconds.get(unit, 0.0) for seconds in passes) if passes else 0.0


def _by_unit(step: RankStep, kind: str, span: Span) -> dict[int, float]:
    """Seconds of computing in a pass, by unit. A forward's begin where the computation asks for
    parameters, a backward's end where gradients leave."""
    forward = kind == "gather"
    places = sorted(
        (m.wanted if forward else m.started, m.unit) for m in step.moves if m.kind == kind
    )
    inside = [(time, unit) for time, unit in places if span[0] <= time <= span[1]]
    units = [unit for _, unit in inside]
    # What lies outside of the first and last of them is theirs, too.
    times = [time for time, _ in (inside[1:] if forward else inside[:-1])]
    found: dict[int, float] = {}
    for unit, part in zip(units, pairwise((span[0], *times, span[1])), strict=bool(units)):
        found[unit] = found.get(unit, 0.0) + _computed(step, [part])
    return found


def _whole(move: Move, run: Run) -> float:
    """Bytes of the buffer of which a rank has sent what the others lack. Through shared memory it
    sends nothing."""
    ranks = run.world_size
    return move.bytes * ranks / (ranks - 1) if move.bytes else float(run.units[move.unit].bytes)


# ---- collectives ------------------------------------------------------------------------------


def travels(run: Run) -> list[Travel]:
    """Each collective of each plan, in the median step."""
    seen: dict[tuple[object, ...], list[Travel]] = {}
    for ranks in by_step(run).values():
        for key, travel in _travelled(run, ranks):
            seen.setdefault((ranks[0].plan, *key), []).append(travel)
    return [
        Travel(some[0].kind, some[0].nbytes, median(travel.seconds for travel in some))
        for some in seen.values()
    ]


def _travelled(run: Run, ranks: Sequence[RankStep]) -> Iterator[tuple[tuple[object, ...], Travel]]:
    """How long each one of a step was under way.

    It begins once the last rank has launched it and the one before is through.
    """
    through = 0
    for key, kind, nbytes, launched, done in _launched(run, ranks):
        begun, through = max(through, launched), done
        if through > begun:
            yield key, Travel(kind, nbytes, _NS * (through - begun))


def _launched(
    run: Run, ranks: Sequence[RankStep]
) -> Iterator[tuple[tuple[object, ...], str, int, int, int]]:
    """In order: what it is, kind, bytes, when the last rank launched it and when it was done."""
    for buckets in zip(*(step.buckets for step in ranks), strict=False):
        launched, done = max(b.launched for b in buckets), max(b.done for b in buckets)
        yield (buckets[0].bucket,), "all_reduce", buckets[0].bytes, launched, done
    by_key = [{(m.unit, m.kind, m.turn): m for m in step.moves} for step in ranks]
    for key, first in by_key[0].items():
        moves = [found[key] for found in by_key if key in found]
        if len(moves) == len(ranks) and first.kind in _COLLECTIVES:
            launched, done = max(m.started for m in moves), max(m.done for m in moves)
            yield key, _COLLECTIVES[first.kind], round(_whole(first, run)), launched, done
