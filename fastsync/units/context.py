"""What the units of one model know together: in which order they run, and what is under way.

Every rank gathers and reduces the same units in the same order: that of its modules' forwards and
of their backward. Prefetching follows an order that was observed in a former forward, which is the
same on every rank too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from fastsync.engine import core
from fastsync.engine.steps import StepWatcher, params_of, watch_steps
from fastsync.ranks.links import new_part
from fastsync.timeline.moves import UnitInfo
from fastsync.timeline.recorder import Recorder
from fastsync.torch_private import outside_transforms
from fastsync.units.links import Links
from fastsync.units.mesh import Place
from fastsync.units.room import MARK, NO_MARK, fits, mark_here
from fastsync.units.strand import Strand
from fastsync.units.unit import Unit

__all__ = ["Context"]

# Reductions whose buffers may be under way at once.
IN_FLIGHT = 1


class UnitState(Protocol):
    """What a context knows of a state."""

    unit: Unit | None


S = TypeVar("S", bound=UnitState)


class Context(StepWatcher, Generic[S]):
    """Shared by the states of one root module; before its first forward, of each state alone.

    Args:
        first: that it begins with.

    Attributes:
        root_forward: the state whose forward is the outermost one of those that run.
        ends_queued: whether the running backward will call the root at its end.
        last_backward: whether what was observed in forward is forgotten after the next backward.
        in_memory: whether ranks of one machine may exchange through memory that they share.
        infos: how timelines call the units, once that is known; the list stays the same one.
        recorder: asked before every forward that counts, if there is one.
    """

    _told_last = 0  # when a script said so

    def __init__(self, first: S) -> None:
        self.states = [first]
        self.root_forward: S | None = None
        self.ends_queued = False
        self.last_backward = True
        self.in_memory = True
        self.most_in_flight = IN_FLIGHT
        self.infos: list[UnitInfo] = []
        self.recorder: Recorder | None = None
        self.mark = NO_MARK  # bytes that units may take, so that others are gathered ahead
        self._links: dict[dist.ProcessGroup, Links] = {}
        self._named: list[Strand] = []
        self._keepers: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}
        self._order: list[Unit] = []  # of the last forward that came to its end
        self._running: list[Unit] = []  # of the forward that runs
        self._follows = True  # that forward runs as the last one did
        self._ahead: set[int] = set()  # gathered before anybody asked, and not used so far
        self._done: list[Unit] = []  # forwards, for which backwards will come
        self._reducing: deque[Unit] = deque()
        self.stop_watching = watch_steps(self)

    def units(self) -> list[Unit]:
        return [state.unit for state in self.states if state.unit is not None]

    def tell_last_backward(self, is_last: bool) -> None:
        """A script says whether the next backward is the last one."""
        self.last_backward, self._told_last = is_last, time.monotonic_ns()

    def take_over(self, other: Context[S]) -> None:
        """Knows what a state has done and heard alone, which is one of these states from now on."""
        self.most_in_flight = max(self.most_in_flight, other.most_in_flight)
        if other._told_last > self._told_last:
            self.last_backward, self._told_last = other.last_backward, other._told_last
        self.mark = min(self.mark, other.mark)
        if other.in_memory == self.in_memory:
            self._links = {**other._links, **self._links}
        self._keepers = {**other._keepers, **self._keepers}
        other.stop_watching()

    # --- links

    def links_of(self, place: Place) -> Links:
        """Collective the first time, on the ranks that share and on those that repeat them."""
        if place.group not in self._links:
            self.mark = mark_here()
            about = {
                f"what unit {unit.name or number!r} travels as": unit.travels_as()
                for number, unit in enumerate(self.units())
                if unit.place.group is place.group
            }
            about[MARK] = "none" if self.mark == NO_MARK else f"{self.mark} bytes"
            with outside_transforms():
                self._links[place.group] = Links.of(place, self.in_memory, self.mark, about)
        return self._links[place.group]

    def connect(self, unit: Unit) -> None:
        """It can be gathered, and resharded to fewer ranks. Collective the first time."""
        unit.connect(self.links_of(unit.place))
        number = unit.switches.reshard_to
        if number is None or unit.keepers is not None:
            return
        group = unit.place.group
        if (group, number) not in self._keepers:
            self._keepers[group, number] = new_part(group, number, "between forward and backward")
        unit.keepers = self._keepers[group, number]

    @cached_property
    def log(self) -> core.UnitLog:
        """What they do, step by step."""
        return core.make_unit_log()

    def strands(self) -> list[Strand]:
        return [strand for unit in self.units() for strand in unit.strands]

    def introduce(self) -> None:
        """Says how the units are called; they are connected. In the same order on every rank."""
        strands = self.strands()
        if strands == self._named:
            return
        self._named = strands
        self.infos[:] = [info for unit in self.units() for info in unit.infos()]
        for number, (strand, info) in enumerate(zip(strands, self.infos, strict=True)):
            strand.call(core.make_unit_name(number, info.words, info.parameters))
        names = [f"unit {info.name!r}" for info in self.infos]
        for links in self.all_links():
            for peers in links.peers():
                peers.join(self.log, names)

    def all_links(self) -> Iterator[Links]:
        """Also those that a unit had when it was gathered before the first forward of the root."""
        return iter({id(s.links): s.links for s in self.strands() if s.links is not None}.values())

    def counters(self) -> list[core.UnitCounters]:
        return [peers.ranks.stats() for links in self.all_links() for peers in links.peers()]

    def trim(self) -> None:
        for links in self.all_links():
            links.core.trim()

    # --- the order of forwards

    def begin_forward(self, in_backward: bool, counts: bool) -> None:
        """The outermost forward begins; one `in_backward` computes again what has been counted."""
        self._running, self._follows = [], True
        if in_backward:
            return
        if counts and self.recorder is not None:
            self.recorder.before_step(self.log)
        self.log.begin_forward(counts)

    def enter(self, unit: Unit) -> None:
        """A forward of `unit` has its parameters: starts to gather those of the next one."""
        at = len(self._running)
        self._running.append(unit)
        self._follows = self._follows and at < len(self._order) and self._order[at] is unit
        if self._follows and at + 1 < len(self._order):
            self.prefetch_forward(self._order[at + 1])

    def arrived(self, unit: Unit) -> None:
        """Somebody uses what was gathered."""
        self._ahead.discard(id(unit))

    def after_step(self, optimizer: Optimizer) -> None:
        """Has units know when their shares have changed.

        Seen on every rank alike, as versions of tensors are not: some ranks' shares are empty.
        """
        held = set(map(id, params_of(optimizer)))
        for unit in self.units():
            unit.stale = unit.stale or any(id(member.sharded) in held for member in unit.members)

    def prefetch_forward(self, unit: Unit) -> None:
        """Starts to gather what the next forward computes with."""
        unit.refresh()
        self._gather_ahead(unit, backward=False)

    def prefetch(self, unit: Unit) -> None:
        """For a backward: with the parameters that forward had, where they are still there."""
        self._gather_ahead(unit, backward=True)

    def _gather_ahead(self, unit: Unit, backward: bool) -> None:
        if not unit.is_whole and self._has_room(unit, backward):
            unit.start_gather()
            self._ahead.add(id(unit))

    def _has_room(self, unit: Unit, backward: bool) -> bool:
        """Whether `unit` fits in besides those that are whole, or will be before anybody asks.

        That is the same on every rank, as what ranks run is.
        """
        if self.mark == NO_MARK:
            return True
        every = self.units()
        whole = [u for u in every if u is unit or u.is_whole or id(u) in self._ahead]
        return fits(self.mark, whole, reducing=every if backward else ())

    def leave(self, unit: Unit) -> None:
        """A forward of `unit`, whose backward will come, has ended."""
        unit.places.append(len(self._done))
        self._done.append(unit)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        self.log.end_forward()
        self._order = self._running
        self._drop_prefetched()

    def _drop_prefetched(self) -> None:
        for unit in self.units():
            if id(unit) in self._ahead:
                unit.reshard()
        self._ahead.clear()

    # --- backward

    def begin_backward(self) -> None:
        self.ends_queued = True
        self.log.begin_backward()

    def prefetch_before(self, unit: Unit) -> None:
        """Starts to gather the unit whose backward comes after that of `unit`."""
        if not unit.places:
            return
        at = unit.places.pop()
        if at == 0:
            self.trim()  # nobody will ask for memory again
        if at > 0 and self._done[at - 1].switches.gather_in_backward:
            self.prefetch(self._done[at - 1])

    def reduce(self, unit: Unit) -> None:
        """Sends the gradients of `unit`; before that, waits for former ones. Collective."""
        while len(self._reducing) >= self.most_in_flight:
            self._finish_oldest()
        if unit.in_flight:  # a unit whose backward comes twice
            self._finish_all()
        unit.start_reduce()
        self._reducing.append(unit)

    def _finish_oldest(self) -> None:
        self._reducing.popleft().finish_reduce()

    def _finish_all(self) -> None:
        while self._reducing:
            self._finish_oldest()

    def end_backward(self) -> None:
        """All gradients are where they belong."""
        self._finish_all()
        for unit in self.units():
            unit.finish_sums()
        self.ends_queued = False
        self.root_forward = None
        if self.last_backward:
            self._done.clear()
            for unit in self.units():
                unit.places.clear()
            self._drop_prefetched()
        self.trim()
        self.log.end_work()

    def forget(self) -> None:
        """Lets go of everything that a failed step has left."""
        self._reducing.clear()
        for unit in self.units():
            unit.forget()
        self._done.clear()
        self._ahead.clear()
        self._running = []
        self.ends_queued = False
        self.root_forward = None
        self.trim()
