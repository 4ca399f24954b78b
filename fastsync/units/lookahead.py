"""How far ahead a model's units are gathered: one, until its ranks have agreed on more.

Ranks measure their first steps, in which one unit is gathered ahead. Then, once, they exchange what
they have found: the slowest rank's computation, and each gather as who began it last has seen it.
All of them plan with the same numbers, so all begin the same gathers in the same order. Units that
run in another order than the planned one are gathered one ahead.

In memory that ranks share nothing travels before it is wanted, so one ahead is all that helps. Of
devices, whose time is not the host's, nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist

from fastsync.engine.watch import watched
from fastsync.torch_private import outside_transforms
from fastsync.units.connections import links_in
from fastsync.units.depth import Stop, depths, limit_of
from fastsync.units.links import Links
from fastsync.units.room import NO_MARK
from fastsync.units.strand import bytes_of_gradients
from fastsync.units.unit import Unit

__all__ = ["AGREED_AFTER", "Course", "Lookahead"]

AGREED_AFTER = 3  # steps: the first one has no order to follow
FEWEST_UNITS = 3

_UNSTABLE = -1.0  # instead of a number that stands for an order
_BySeconds = tuple[dict[int, float], dict[int, float]]


class Course:
    """The units of a model's forward, or of its backward, in the order in which they are wanted.

    Attributes:
        order: of the last one that was looked at, as numbers of units.
        settled: whether the one before had the same.
        depths: that are planned, by place; empty before.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.order: list[int] = []
        self.settled = False
        self._clock = clock
        self._looks = False
        self._running: list[int] = []
        self._computes: dict[int, float] = {}  # seconds by unit: the most of its turns in a course
        self._gathers: dict[int, float] = {}
        self._least: _BySeconds = ({}, {})  # the same two, the least of courses alike
        self._since: float | None = None
        self._wanted: float | None = None
        self.depths: tuple[int, ...] = ()
        self._planned: list[int] = []  # units at those places
        self._follows = False

    # --- what is planned

    def plan(self, units: Sequence[Unit], stops: Sequence[Stop], limit: int) -> None:
        """From now on, wherever the order is the present one."""
        self._planned = [id(units[number]) for number in self.order]
        self.depths = depths(stops, limit)

    def expects(self, units: Sequence[Unit]) -> None:
        """They are to run in this order, as far as is known."""
        self._follows = bool(self.depths) and [id(unit) for unit in units] == self._planned

    def depth(self, place: int) -> int:
        """How many units ahead gathers begin when the one at a place of that order is there."""
        return self.depths[place] if self._follows else 1

    # --- what is measured

    def begin(self, looks: bool) -> None:
        """One more begins."""
        self._looks = looks
        self._running, self._computes, self._gathers = [], {}, {}
        self._since = self._wanted = None

    def wants(self) -> None:
        """The computation cannot go on without a unit."""
        if self._looks and self._wanted is None:
            self._wanted = self._clock()

    def there(self, number: int, gathered: float) -> None:
        """A unit's turn has come; its gather took so many seconds."""
        if not self._looks:
            return
        self._close()
        self._running.append(number)
        self._gathers[number] = max(gathered, self._gathers.get(number, 0.0))
        self._since, self._wanted = self._clock(), None

    def _close(self) -> None:
        """The unit before has computed."""
        if self._since is None:
            return
        ended = self._clock() if self._wanted is None else self._wanted
        number = self._running[-1]
        self._computes[number] = max(ended - self._since, self._computes.get(number, 0.0))

    def end(self) -> None:
        if not self._looks:
            return
        self._close()
        self._looks = False
        self.settled = self._running == self.order
        self.order = self._running
        if self.settled:
            for now, was in zip((self._computes, self._gathers), self._least, strict=True):
                now.update({number: min(now[number], was[number]) for number in now})
        self._least = self._computes, self._gathers

    def seconds(self, units: int) -> tuple[list[float], list[float]]:
        """Of computation and of gathers, by unit: the least of courses alike."""
        computes, gathers = ([found.get(n, 0.0) for n in range(units)] for found in self._least)
        return computes, gathers


class Lookahead:
    """Both directions of one model, and the exchange between its ranks.

    Args:
        clock: that tells seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.forward, self.backward = Course(clock), Course(clock)
        self.over = False  # whether everything is known that will be

    def begin_step(self, units: Sequence[Unit]) -> None:
        """A forward begins that may be looked at."""
        if self.over:
            return
        links = _only_links(units)
        self.over = links is None
        if links is not None:
            links.core.time_gathers(True)

    def end_step(self, units: Sequence[Unit], steps: int, mark: int) -> None:
        """Plans what comes, once enough is known. Collective then.

        Args:
            units: of the model.
            steps: that have ended, the same on every rank.
            mark: bytes that units may take; see fastsync/units/room.py.
        """
        if self.over or steps < AGREED_AFTER:
            return
        self.over = True
        links = _only_links(units)
        if links is None:
            return
        links.core.time_gathers(False)
        found = _most(self._numbers(len(units)), links)
        order, count = found[:2], len(units)
        if order[0] == -order[1] and order[0] != _UNSTABLE:
            rows = [found[2 + n * count : 2 + (n + 1) * count] for n in range(4)]
            self._plan(units, rows, mark)

    def _numbers(self, units: int) -> list[float]:
        """Of which the largest of all ranks count."""
        orders = (tuple(self.forward.order), tuple(self.backward.order))
        settled = self.forward.settled and self.backward.settled
        order = float(crc32(repr(orders).encode())) if settled else _UNSTABLE
        numbers = [order, -order]
        for course in (self.forward, self.backward):
            computes, gathers = course.seconds(units)
            numbers += computes
            numbers += [-seconds for seconds in gathers]
        return numbers

    def _plan(self, units: Sequence[Unit], rows: Sequence[list[float]], mark: int) -> None:
        ahead, back = self.forward, self.backward
        first = _stops(units, ahead.order, rows[0], rows[1])
        second = _stops(units, back.order, rows[2], rows[3])
        if mark == NO_MARK:
            second = _with_gradients(units, back.order, second)
            limit = limit_of(second)
        else:
            limit = mark - sum(unit.bytes_to_gather() for unit in units if _stays(unit))
            most = max(unit.bytes_to_reduce() for unit in units)
            second = [Stop(s.compute, s.gather, s.nbytes, most) for s in second]
        ahead.plan(units, first, limit)
        back.plan(units, second, limit)


def _only_links(units: Sequence[Unit]) -> Links | None:
    """Those that all units have, where gathers travel while the host computes."""
    connected = all(strand.links is not None for unit in units for strand in unit.strands)
    if len(units) < FEWEST_UNITS or not connected:
        return None
    found = links_in(units)
    return found[0] if len(found) == 1 and found[0].travels else None


def _stays(unit: Unit) -> bool:
    """Between forward and backward."""
    return not unit.switches.reshard_after_forward


def _stops(
    units: Sequence[Unit], order: Sequence[int], computes: list[float], gathers: list[float]
) -> list[Stop]:
    """`gathers`: seconds, negative."""
    return [
        Stop(computes[n], -gathers[n], 0 if _stays(units[n]) else units[n].bytes_to_gather())
        for n in order
    ]


def _with_gradients(
    units: Sequence[Unit], order: Sequence[int], stops: Sequence[Stop]
) -> list[Stop]:
    """Gradients come while a unit computes, and those of the one before travel."""
    found, travelling = [], 0
    for number, stop in zip(order, stops, strict=True):
        own = sum(map(bytes_of_gradients, units[number].strands))
        found.append(Stop(stop.compute, stop.gather, stop.nbytes, own + travelling))
        travelling = own + units[number].bytes_to_reduce()
    return found


def _most(numbers: Sequence[float], links: Links) -> list[float]:
    """The largest of all ranks, one by one. Collective."""
    with outside_transforms(), torch.no_grad():
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        start = partial(
            dist.all_reduce, mine, op=dist.ReduceOp.MAX, group=links.used, async_op=True
        )
        watched(links.shares.group, "the plan of how far ahead units are gathered", start)
        return [float(number) for number in mine.tolist()]
