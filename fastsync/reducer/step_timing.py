"""Ranks that the others wait for, and the activity in which they are slow.

The rank that waits least while others wait is the one that they wait for. csrc/fault/step_timing.h
says how ranks measure that, and how all ranks learn the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from fastsync._build.env import Env
from fastsync.faults.wording import name_ranks

if TYPE_CHECKING:
    from fastsync.reducer.core import Reducer

_log = logging.getLogger("fastsync")
_NS = 1e-9

# What a rank may be slow with, in the order of the engine's; the last of its activities is waiting.
ACTIVITIES = ("between steps", "forward", "backward", "packing")
_WINDOW = 50  # steps; StepTiming::kWindow
_NOTEWORTHY = 0.05  # of the step: less is noise
_WORTH_A_WARNING = 5e-3  # seconds of each step: nothing is gained by less
_MENTIONED = 0.2  # of what slow ranks cost: what makes up less of it is left out
_DISTANCE = 3  # each warning comes so many times later
_REMEDIES = {
    "between steps": "Look at its data loader, and at what its script does between steps",
    "forward": "Look at the sizes of its batches, its cores, and what else runs on its machine",
    "backward": "Look at the sizes of its batches, its cores, and what else runs on its machine",
    "packing": "Look at its memory, and what else runs on its machine",
}


class StepTimingRecord(Protocol):
    """One rank's means over a window.

    Attributes:
        times: of a step in nanoseconds, by activity; the last is waiting.
    """

    @property
    def rank(self) -> int: ...

    @property
    def times(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class SlowRanks:
    """Ranks that the others wait for, on average over some steps; the same on every rank.

    Attributes:
        ranks: one, or some that are slow alike, such as those of one machine; half at most.
        cost: seconds of each step that the others would not wait if these were no slower than the
            next rank.
        share: of the step.
        excess: seconds per step that they take longer than the next rank, by what they do:
            "between steps" (data, the optimizer, backwards under `no_sync()`), "forward",
            "backward", "packing". Negative where they are faster.
    """

    ranks: tuple[int, ...]
    cost: float
    share: float
    excess: Mapping[str, float] = field(hash=False)

    @property
    def slow(self) -> str:
        """Return the activity in which they lose most time, one of the keys of `excess`."""
        return max(self.excess, key=lambda activity: self.excess[activity])

    def __str__(self) -> str:
        """Describe them, such as "rank 2, for 30.2 ms (84 %) of each step: it takes 30.9 ms longer
        in forward".
        """
        it_takes = "it takes" if len(self.ranks) == 1 else "they take"
        worst = sorted(ACTIVITIES, key=lambda activity: -self.excess[activity])
        said = [a for a in worst if a == self.slow or self.excess[a] > _MENTIONED * self.cost]
        where = " and ".join(f"{1e3 * self.excess[a]:.1f} ms longer {during(a)}" for a in said)
        return (
            f"{name_ranks(self.ranks)}, for {1e3 * self.cost:.1f} ms ({self.share:.0%}) of each "
            f"step: {it_takes} {where}"
        )


@dataclass(frozen=True)
class StepTiming:
    """Time that ranks wait for each other, on average over a window of steps; the same on every
    rank.

    Attributes:
        steps: number of steps at the end of the window.
        step_time: seconds.
        network_time: seconds per step that even the rank that waits least spends waiting. No rank
            is late then, so it waits for the network.
        slow: the ranks that the others wait for; None where no rank keeps them waiting for long.
    """

    steps: int
    step_time: float
    network_time: float
    slow: SlowRanks | None


def step_timing_of(steps: int, earliest: Sequence[StepTimingRecord], ranks: int) -> StepTiming:
    """Judge a window.

    Ranks are slow where a gap divides their waiting from that of the rest, and they are half of all
    at most. Ranks that wait alike have no gap: all are slow, or the network is.

    Args:
        steps: those that had been made at its end.
        earliest: those that wait least, in that order; not necessarily all ranks.
        ranks: how many there are.
    """
    waits = [record.times[-1] for record in earliest]
    step_time = _NS * sum(earliest[0].times)
    gaps = [later - sooner for sooner, later in pairwise(waits)]
    candidates = gaps[: ranks // 2]
    slow = None
    if candidates and _NS * max(candidates) >= _NOTEWORTHY * step_time:
        count = candidates.index(max(candidates)) + 1
        slow = _slow_ranks(earliest[:count], earliest[count], step_time)
    return StepTiming(steps, step_time, _NS * waits[0], slow)


def _slow_ranks(
    slow: Sequence[StepTimingRecord], following: StepTimingRecord, step_time: float
) -> SlowRanks:
    cost = _NS * (following.times[-1] - slow[-1].times[-1])
    excess = {}
    for index, activity in enumerate(ACTIVITIES):
        mean = sum(record.times[index] for record in slow) / len(slow)
        excess[activity] = _NS * (mean - following.times[index])
    return SlowRanks(tuple(sorted(r.rank for r in slow)), cost, cost / step_time, excess)


class SlowRankWarning:
    """Warns of ranks that the others wait for, more and more rarely.

    Args:
        share: of the step that they must cost.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._distance = 1  # in windows
        self._next = 0

    def look_at(self, step_timing: StepTiming | None) -> None:
        """Log a warning where one is due."""
        slow = None if step_timing is None else step_timing.slow
        if step_timing is None or slow is None or step_timing.steps < self._next:
            return
        if slow.share < self._share or slow.cost < _WORTH_A_WARNING:
            return
        self._next = step_timing.steps + _WINDOW * self._distance
        self._distance *= _DISTANCE
        first = step_timing.steps - _WINDOW + 1
        _log.warning(
            "fastsync: the others wait for %s (steps %d to %d). %s",
            slow,
            first,
            step_timing.steps,
            _REMEDIES[slow.slow],
        )


class StepTimingWatch:
    """Watch of how long one model's ranks wait for each other, and for which ranks.

    Args:
        group: whose ranks are compared.
    """

    def __init__(self, core: Reducer, group: dist.ProcessGroup) -> None:
        self._core, self._group = core, group
        self._warning = SlowRankWarning(Env.read().straggler_warn)

    def measured(self) -> StepTiming | None:
        """Return the timing of the latest window that all ranks know; None before, and without
        a watch.
        """
        report = self._core.step_timing()
        if report is None:
            return None
        return step_timing_of(report.steps, report.earliest, self._group.size())

    def warn(self) -> None:
        """Warn on rank 0 about slow ranks, once for each window that all
        ranks have come to know.
        """
        if self._group.rank() == 0:
            self._warning.look_at(self.measured())


def during(activity: str) -> str:
    """Return "between steps", "in forward", ..."""
    return activity if activity == "between steps" else f"in {activity}"
