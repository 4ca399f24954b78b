"""State that the units of one model share: the order in which they run, and what is under way.

Every rank gathers and reduces the same units in the same order: that of its modules' forwards and
of their backward. Prefetching follows an order that was observed in a former forward, which is the
same on every rank too. One unit is gathered ahead, and those that a script names.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from fastsync._torch import caller_level, local_of
from fastsync.faults.sync_fault import SyncFault
from fastsync.fsdp.connections import NO_MARK, Connections, fits, links_in, travels
from fastsync.fsdp.dtype_shard import finalize_gradients, release_gradients
from fastsync.fsdp.group_links import Links
from fastsync.fsdp.loaded_state import LoadedStates
from fastsync.fsdp.local_steps import LocalSteps
from fastsync.fsdp.param_group import Unit
from fastsync.fsdp.sharded_param import OWNER
from fastsync.reducer import core
from fastsync.reducer.mean_weights import MeanWeights, Number
from fastsync.reducer.optimizer_hooks import Arguments, StepWatcher, params_of, watch_steps
from fastsync.reducer.reports import UnitCounters
from fastsync.reducer.weak_calls import weakly
from fastsync.timeline.recorder import Recorder

# Reductions whose buffers may be under way at once.
IN_FLIGHT = 1
# Units at the end of a backward, where gradients take most: what others have left is freed there.
LAST_UNITS = 3


class UnitState(Protocol):
    """State of a module, as a context knows it."""

    unit: Unit | None
    is_root: bool | None

    def announce_backward(self) -> None: ...
    def check_layers(self) -> None: ...


S = TypeVar("S", bound=UnitState)


def _nothing() -> None:
    """Prefetch nothing: the caller has nothing to gather ahead."""


def _trains(unit: Unit) -> bool:
    """Return whether a backward would reduce gradients of `unit`."""
    return unit.switches.reduce and any(m.sharded.requires_grad for m in unit.params)


def _warn_without_gradients(units: Sequence[Unit]) -> None:
    """Warn if an optimizer of these is about to do nothing, after a forward without a backward."""
    grads = (param.sharded.grad for unit in units for param in unit.params)
    if any(unit.places for unit in units) and all(grad is None for grad in grads):
        warnings.warn(
            "an optimizer steps, none of whose parameters has a gradient, though a forward has "
            "computed with them. backward(inputs=model.parameters()) computes nothing where these "
            "are shards: leave out inputs=",
            stacklevel=caller_level(),
        )


class Context(StepWatcher, Generic[S]):
    """Shared by the states of one root module; before its first forward, of each state alone.

    Args:
        first: that it begins with.

    Attributes:
        root_forward: the state whose forward is the outermost one of those that run.
        ending: refers to what the running backward will call at its end, which autograd drops if
            the backward fails; None: no backward has begun.
        faulty: it has been in vain to wait for other ranks, and will be.
        creates_graph: the running backward, or the last one, is differentiated again, so that the
            unsharded parameters stay.
        conceals: between a forward and its backward scripts see shares, unless they asked for
            unsharded parameters.
        last_backward: whether what was observed in forward is forgotten after the next backward.
        connections: to other ranks.
        recorder: asked before every forward that counts, if there is one.
        weights: those of the micro-batches; None: the script has given none.
    """

    _set_at = 0  # when a script set `last_backward`

    def __init__(self, first: S) -> None:
        self.states = [first]
        self.root_forward: S | None = None
        self.ending: weakref.ref[Callable[[], None]] | None = None
        self.creates_graph = self.conceals = self.faulty = False
        self.last_backward = True
        self.connections = Connections()
        self.most_in_flight = IN_FLIGHT
        self.recorder: Recorder | None = None
        self.weights: MeanWeights | None = None
        self._backwards = 0  # since gradients were last sent
        self._scale: Number | None = None  # by weights, of the running backward
        self._order: list[Unit] = []  # of the last forward that came to its end
        self._running: list[Unit] = []  # of the forward that runs
        self._follows = True  # that forward runs as the last one did
        self._ahead: set[int] = set()  # gathered before they were needed, and not used so far
        self._done: list[Unit] = []  # forwards, for which backwards will come
        self._ends_soon = False  # the running backward
        self._reducing: deque[Unit] = deque()
        self._local_steps, self._loaded = LocalSteps(), LoadedStates()
        self.stop_watching = watch_steps(self)

    @cached_property
    def gradients(self) -> core.UnitGradients:
        """Return the watch for gradients that arrive while no output of a module has announced
        them.
        """
        return core.UnitGradients(weakly(self._announce_backward))

    def _announce_backward(self) -> None:
        self.states[0].announce_backward()

    def units(self) -> list[Unit]:
        return [state.unit for state in self.states if state.unit is not None]

    def tell_last_backward(self, is_last: bool) -> None:
        """A script says whether the next backward is the last one."""
        self.last_backward, self._set_at = is_last, time.monotonic_ns()

    def merge(self, other: Context[S]) -> None:
        """Learn what another context has noted alone; its states belong to this one from now on."""
        self.most_in_flight = max(self.most_in_flight, other.most_in_flight)
        if other._set_at > self._set_at:
            self.last_backward, self._set_at = other.last_backward, other._set_at
        self.connections.merge(other.connections)
        if other.weights is not None:
            raise RuntimeError("add_weight() was called on a module that is not the root")
        other.stop_watching()

    def averages(self) -> list[torch.Tensor | None]:
        """Return this rank's part of each gradient."""
        grads = [param.sharded.grad for unit in self.units() for param in unit.params]
        return [None if grad is None else local_of(grad) for grad in grads]

    def all_links(self) -> list[Links]:
        return links_in(self.units())

    def counters(self) -> list[UnitCounters]:
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
            self.recorder.before_step(self.connections.log)
        evaluates = not counts and any(map(_trains, self.units()))
        self.connections.log.begin_forward(counts, evaluates)

    def enter(self, unit: Unit) -> None:
        """Start to gather the unit after `unit`, whose forward has started its own gather."""
        at = len(self._running)
        self._running.append(unit)
        self._follows = self._follows and at < len(self._order) and self._order[at] is unit
        if self._follows and at + 1 < len(self._order):
            self.prefetch_forward(self._order[at + 1])

    def gather(self, units: Sequence[Unit], prefetch: Callable[[], None] = _nothing) -> None:
        """The computation needs `units` to go on.

        Args:
            prefetch: starts to gather what comes next. Where that travels while this thread waits,
                it starts at once, after `units`, otherwise when they are there.
        """
        at_once = all(map(travels, units))
        with self._waiting():
            if at_once:
                for unit in units:
                    self._start(unit)
                prefetch()
            for unit in units:
                self._finish(unit)
            if not at_once:
                prefetch()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for other ranks within; mark this context as faulty if one has failed."""
        try:
            yield
        except SyncFault:
            self.faulty = True
            raise

    def _start(self, unit: Unit) -> None:
        if not unit.is_unsharded:
            unit.start_gather()
            self._ahead.add(id(unit))

    def _finish(self, unit: Unit) -> None:
        unit.finish_gather()
        self._ahead.discard(id(unit))

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step on what is not synchronised.

        Raises:
            RuntimeError: the optimizer holds such a parameter.
        """
        params = [param for unit in self.units() for param in unit.params]
        held = {id(tensor): tensor for tensor in params_of(optimizer)}
        for param in params:
            if param.unsharded is not None and id(param.unsharded) in held:
                raise RuntimeError(
                    f"the optimizer holds the unsharded parameter {param.name!r}, which nothing "
                    "synchronises; make the optimizer where the parameters are sharded: before the "
                    "forward, or after model.reshard()"
                )
        sharded = {id(param.sharded) for param in params}
        others = [tensor for identity, tensor in held.items() if identity not in sharded]
        for tensor in others:
            owner = getattr(tensor, OWNER, None)
            if owner is not None and owner[0]() is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds parameter {owner[1].name!r} as it was "
                    "before fully_shard(), which the model no longer uses; make the optimizer "
                    "after fully_shard(), from model.parameters()"
                )
        if 0 < len(others) < len(held):  # the others may have been added to the model
            self.states[0].check_layers()

    def replaces(self, optimizer: Optimizer) -> bool:
        """Return whether it steps on shares."""
        return len(self._stepped_by(optimizer)) > 0

    def _stepped_by(self, optimizer: Optimizer) -> list[Unit]:
        """Return the units that have a parameter on which an optimizer steps."""
        held = set(map(id, params_of(optimizer)))
        return [u for u in self.units() if any(id(param.sharded) in held for param in u.params)]

    def replace_step(self, optimizer: Optimizer, args: Arguments) -> Arguments | None:
        """Let the optimizer step on the local shards."""
        self.trim()  # of the backward's last messages too, which the others have read by now
        stepped = self._stepped_by(optimizer)
        if self.ending is None:  # no backward has failed
            for unit in stepped:
                unit.take_set_gradients()
        _warn_without_gradients(stepped)
        params = [param for unit in self.units() for param in unit.params]
        self._loaded.shard(optimizer, params)
        if self.states[0].is_root is None:
            # A closure's forward, which is the first one, may end this context within the step.
            return None
        return self._local_steps.before(optimizer, args, (param.sharded for param in params))

    def end_step(self, optimizer: Optimizer) -> None:
        """Give the optimizer the state that its shares have got in the step.

        Hooks of the script may run a forward, which has to gather what the step has changed.
        """
        self._local_steps.after(optimizer)
        self.after_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Mark units whose shares have changed, and free what no backward needs any more.

        Every rank sees the same; versions of tensors would differ, since some ranks' shares are
        empty.
        """
        for unit in self._stepped_by(optimizer):
            unit.stale = True
            if unit.is_unsharded and (unit.running or not unit.places):
                unit.reshard()
                if unit.running:  # a step within a forward
                    self.gather([unit])

    def prefetch_forward(self, unit: Unit) -> None:
        """Start to gather the parameters that the next forward computes with."""
        unit.refresh()
        self._gather_ahead(unit, backward=False)

    def prefetch(self, unit: Unit) -> None:
        """Start to gather for a backward, with the parameters that forward
        had, where still there.
        """
        self._gather_ahead(unit, backward=True)

    def _gather_ahead(self, unit: Unit, backward: bool) -> None:
        if not unit.is_unsharded and self._has_room(unit, backward):
            self._start(unit)

    def _has_room(self, unit: Unit, backward: bool) -> bool:
        """Return whether `unit` fits in besides those that are, or will be, whole before they are
        needed.

        The answer is the same on every rank, since all ranks run the same units.
        """
        if self.connections.mark == NO_MARK:
            return True
        every = self.units()
        whole = [u for u in every if u is unit or u.is_unsharded or id(u) in self._ahead]
        return fits(self.connections.mark, whole, reducing=every if backward else ())

    def leave(self, unit: Unit) -> None:
        """Note that a forward of `unit` has ended, whose backward will come."""
        unit.places.append(len(self._done))
        self._done.append(unit)

    def end_forward(self) -> None:
        """The outermost forward has ended."""
        self.connections.log.end_forward()
        self._order = self._running
        self.forget_prefetched()
        self._release_gradients()
        self._show_shares()

    def _show_shares(self) -> None:
        """Show scripts the parameters that an optimizer steps on, from here on."""
        for unit in self.units():
            if self.conceals and not unit.stays:
                unit.conceal()
            elif unit.is_unsharded:
                unit.lend_gradients()

    def _release_gradients(self) -> None:
        """Let scripts write to the shares from here on."""
        for unit in self.units():
            release_gradients(unit.dtype_shards)

    def forget_prefetched(self) -> None:
        """Let go of units that were gathered ahead, and not used."""
        for unit in self.units():
            if id(unit) in self._ahead:
                unit.reshard()
        self._ahead.clear()

    # --- backward

    def begin_backward(self) -> None:
        for unit in self.units():
            if unit.running:  # a backward within a forward, which may have frozen other parameters
                unit.freeze_alike()
        self._ends_soon = False
        self.creates_graph = torch.is_grad_enabled()
        self.gradients.announce(True)
        for unit in self.units():
            unit.take_script_gradients()
        self._begin_to_weigh()
        self.connections.log.begin_backward()

    def _begin_to_weigh(self) -> None:
        """Start to add up weights, if this backward sends gradients. Collective then.

        Raises:
            RuntimeError: a unit's own settings keep the mean from it.
        """
        self._scale = None
        switches = [unit.switches for unit in self.units() if unit.trains]
        if switches:
            self._backwards += 1
        sends = any(each.reduce for each in switches)
        if self.weights is not None and not switches:
            self.weights.drop()
        elif self.weights is not None and not sends:
            self.weights.count_backward()
        elif self.weights is not None:
            self.weights.begin_backward(accumulated=False)  # what is kept here is not cleared
            if not all(s.reduce and s.all_reduce and not s.divisor for s in switches):
                raise RuntimeError(
                    "with add_weight() all units send their gradients in the same backwards, to "
                    "all replicas, and without a divisor of their own"
                )
            self.weights.start(self._backwards, 1.0 / self.units()[0].place.ranks)
        if sends:
            self._backwards = 0

    def prefetch_before(self, unit: Unit) -> None:
        """Starts to gather the unit whose backward comes after that of `unit`."""
        if not unit.places:
            return
        at = unit.places.pop()
        if at > 0 and self._done[at - 1].switches.gather_in_backward:
            self.prefetch(self._done[at - 1])
        self._ends_soon = at < LAST_UNITS

    def reduce(self, unit: Unit) -> None:
        """Send the gradients of `unit`, after a wait for former ones. Collective."""
        with self._waiting():
            while len(self._reducing) >= self.most_in_flight:
                self._finish_oldest()
            if unit.in_flight:  # a unit whose backward comes twice
                self._finish_all()
        if self._ends_soon:
            self.trim()
        if self.weights is not None and self._scale is None and unit.trains:
            self._scale = self.weights.scale()
        unit.start_reduce(self._scale)
        self._reducing.append(unit)

    def _finish_oldest(self) -> None:
        self._reducing.popleft().finish_reduce()

    def _finish_all(self) -> None:
        while self._reducing:
            self._finish_oldest()

    def end_backward(self) -> None:
        """Finish a backward: all gradients are then where they belong."""
        self._deliver_all()
        self.root_forward = None
        if self.last_backward:
            self._done.clear()
            for unit in self.units():
                unit.places.clear()
            self.forget_prefetched()
        self._release_gradients()
        self._show_shares()
        self.trim()
        self.connections.log.end_work()

    def end_backward_in_forward(self) -> None:
        """End a backward that the script called within a forward, which goes on."""
        self._deliver_all()
        self._release_gradients()
        self.connections.log.end_work()

    def _deliver_all(self) -> None:
        with self._waiting():
            self._finish_all()
            for unit in self.units():
                unit.finish_sums()
        for unit in self.units():
            finalize_gradients(unit.dtype_shards)
        if self.weights is not None and self.weights.is_open:
            self.weights.note_mean()  # also where nothing was reduced: earlier means count less now
        self.ending = None
        self.gradients.announce(False)

    def forget(self) -> None:
        """Release everything that a failed step has left."""
        self._reducing.clear()
        for unit in self.units():
            unit.forget()
        self._done.clear()
        self._ahead.clear()
        self._running = []
        self.ending, self.creates_graph = None, False
        self.gradients.announce(False)
        self.root_forward = None
        self.trim()
