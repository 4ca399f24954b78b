"""Rounds of local steps: counted at the steps of optimizers, ended by averages of parameters.

Each optimizer has rounds of its own: its parameters, and its steps. So several may step in turns.
A step that a GradScaler leaves out on one rank counts, because the other ranks make it.

[Note: what ranks compare]
With the averages travels a digest of what each rank sends: the optimizer, its steps, the parameters
that it trains, and how many forwards outside `no_sync()` the model has had. A script that leaves
out `step()` on one rank, or freezes a parameter there, so gets an error on every rank, and nothing
is merged.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fastsync._torch import backward_is_running, on_scaled_skips
from fastsync.config.sync_modes import Delayed, DiLoCo, SyncMode
from fastsync.faults.consensus import Param, RankMismatchError, Statement
from fastsync.faults.node_links import Nodes
from fastsync.reducer.optimizer_hooks import (
    StepWatcher,
    is_elementwise,
    known_optimizers,
    params_of,
    watch_steps,
)
from fastsync.reducer.process_groups import OwnGroups, new_group, new_part
from fastsync.reducer.unused_parameters import NamedParam
from fastsync.sync.exchange import Exchange, Parts
from fastsync.sync.fragments import Fragment, FragmentState, make_fragment
from fastsync.sync.schedule import Schedule, cut

State = Mapping[str, Any]
# Update by the whole of a parameter's gradient and state; the others that `Delayed` knows, by
# elements.
_TENSORWISE = known_optimizers(("Adafactor", "Muon", "SparseAdam"))


class Rounds(StepWatcher):
    """The rounds of one model.

    Args:
        mode: when ranks average, and what.
        params: the parameters of the model.
        exchange: averages over the ranks.
        on_round: called on all ranks after the same step, at the end of a round.

    Attributes:
        forwards: those outside `no_sync()` so far.
        together: runs what all ranks do together, again where a rank ends meanwhile, and returns
            whether this rank has what comes of it; with False ranks that are slow are left out.
    """

    def __init__(
        self,
        mode: SyncMode,
        params: Sequence[NamedParam],
        exchange: Exchange,
        on_round: Callable[[], None],
    ) -> None:
        self.mode, self.exchange, self.forwards = mode, exchange, 0
        self._names = {id(param.tensor): param.name for param in params}
        self._on_round = on_round
        self._parts: weakref.WeakKeyDictionary[Optimizer, _OptimizerRounds] = (
            weakref.WeakKeyDictionary()
        )
        self.together: Callable[[Callable[[], None], bool], bool] = _run
        self._made = 0  # optimizers seen
        self._inside: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._loaded: dict[int, State] = {}  # of optimizers that have not stepped yet, by number
        self._joins = False  # what is loaded is what the other ranks have, which go on
        watch_steps(self)
        on_scaled_skips(self.skip_step)

    @property
    def local(self) -> bool:
        """Return whether gradients stay on this rank, now."""
        return self.mode.part_size == 1 and self.steps >= self.mode.warmup

    @property
    def steps(self) -> int:
        """Return the steps of the optimizer that has made most."""
        loaded = (int(state["steps"]) for state in self._loaded.values())
        return max([*loaded, *(part.steps for part in self._parts.values())], default=0)

    def count_steps(self) -> int:
        """Return `steps`."""
        return self.steps

    def note_forward(self) -> None:
        """Count a forward outside `no_sync()`."""
        self.forwards += 1
        self.note_marks("forward_start")
        self._inside.clear()  # a step that raised does not matter any more

    def note_marks(self, *marks: str) -> None:
        """Record marks of a step with local gradients; the reducer records those of others."""
        if self.local:
            for mark in marks:
                self.exchange.note(mark, (), 0, time.monotonic_ns())

    def before_step(self, optimizer: Optimizer) -> None:
        """Prepare the rounds of an optimizer. Collective at its first step.

        Raises:
            RuntimeError: it steps inside a backward, or in a CUDA graph.
        """
        if self.replaces(optimizer):
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a step that is captured into a CUDA graph is not counted, and would never "
                    "average; leave sync out, or do not capture optimizer.step()"
                )
            if backward_is_running():
                raise RuntimeError(
                    "sync= cannot count steps inside a backward, which the ranks reach at "
                    "different times; step after backward(), or leave sync out"
                )
            self._inside[optimizer] = self._inside.get(optimizer, 0) + 1
            self.note_marks("backward_end")
            self._part(optimizer)

    def replaces(self, optimizer: Optimizer) -> bool:
        """Return whether it steps on parameters of the model."""
        return any(id(param) in self._names for param in params_of(optimizer))

    def end_step(self, optimizer: Optimizer) -> None:
        """Count a step, before the script's own hooks see what it has made."""
        # A class whose step() calls that of its base has torch call hooks for each.
        inside = self._inside[optimizer] = max(0, self._inside.get(optimizer, 1) - 1)
        if inside == 0:
            self._count(optimizer)

    def skip_step(self, optimizer: Optimizer) -> None:
        """Count a step that a GradScaler has left out on this rank."""
        if self.replaces(optimizer):
            self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        part = self._parts.get(optimizer) or self._part(optimizer)
        ends = part.step()
        if part.number == 0:
            self.exchange.note("round_end", (), part.steps - 1, time.monotonic_ns())
            if ends:
                self._on_round()

    def end_round(self) -> None:
        """Average now, whatever has been sent and merged. Collective."""
        for part in sorted(self._parts.values(), key=lambda part: part.number):
            part.end_round()
        self._on_round()

    def _part(self, optimizer: Optimizer) -> _OptimizerRounds:
        """Return the rounds of an optimizer, for the parameters that it has now."""
        named = [(self._names[id(p)], p) for p in params_of(optimizer) if id(p) in self._names]
        part = self._parts.get(optimizer)
        if part is not None and part.trains(named):
            return part
        state: State | None
        if part is not None:
            number, state, joins = part.number, part.renewed(), False
        else:
            number, state = self._take_loaded([name for name, _ in named])
            joins = self._joins and state is not None
        part = _OptimizerRounds(self, number, optimizer, named)
        if not joins:  # else the others have compared before
            self.together(lambda: part.compare()(), True)
        if state is not None:
            part.load(state)
        self._parts[optimizer] = part
        return part

    def _take_loaded(self, names: Sequence[str]) -> tuple[int, State | None]:
        """Return the number of an optimizer of these parameters, and the state that is loaded."""
        for number, state in self._loaded.items():
            if list(state["params"]) == list(names):
                return number, self._loaded.pop(number)
        self._made += 1
        return self._made - 1, None

    def counters(self) -> dict[str, Any]:
        """Return what averages have cost this rank, as `SyncStats` names it."""
        counted = self.exchange.counters
        return {
            "rounds": counted.averages,
            "round_bytes": counted.sent_bytes,
            "round_seconds": counted.seconds,
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs of this rank. No collective."""
        numbered = {part.number: part.state() for part in self._parts.values()}
        numbered |= {number: dict(state) for number, state in self._loaded.items()}
        optimizers = [state for _, state in sorted(numbered.items())]
        return {"mode": self.mode.describe(), "forwards": self.forwards, "optimizers": optimizers}

    def check(self, state: State) -> None:
        """Check that a state is one of this mode and model.

        Raises:
            ValueError: it is another's.
        """
        if state["mode"] != self.mode.describe():
            raise ValueError(
                f"the state is one of sync={state['mode']}, but the model has "
                f"sync={self.mode.describe()}; wrap the model with the mode of the checkpoint"
            )
        known = set(self._names.values())
        names = [name for optimizer in state["optimizers"] for name in optimizer["params"]]
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"the state has an optimizer of {unknown[0]!r}, but the model has no such "
                "parameter; load it into the model that it was saved from"
            )

    def load(self, state: State) -> None:
        """Go on from what `state()` has returned; optimizers find theirs at their next step."""
        for part in self._parts.values():
            part.drain()
        self._parts.clear()
        self.forwards, self._joins = int(state["forwards"]), False
        self._loaded = dict(enumerate(state["optimizers"]))
        self._made = len(self._loaded)

    def join(self, state: State) -> None:
        """Go on from what `state()` has returned on another rank, which goes on beside this one.

        What codes have lost there is sent there.
        """
        optimizers = [dict(optimizer) for optimizer in state["optimizers"]]
        for optimizer in optimizers:
            kept = {kind: held for kind, held in optimizer["kept"].items() if kind != "residual"}
            optimizer["kept"] = kept
        self._parts.clear()  # nothing of theirs is merged any more
        self.load({**state, "optimizers": optimizers})
        self._joins = True


class _OptimizerRounds:
    """The rounds of one optimizer. Must not keep it alive.

    Args:
        number: of the optimizer, in the order of their first steps.
        named: parameters of the model that it has, by name.

    Attributes:
        steps: those made, or left out by a GradScaler.
    """

    def __init__(
        self,
        owner: Rounds,
        number: int,
        optimizer: Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        self._owner, self._mode, self.number, self.steps = owner, owner.mode, number, 0
        self._optimizer, self._class = weakref.ref(optimizer), type(optimizer).__qualname__
        self._named = list(named)
        self._trained = [param.requires_grad for _, param in named]
        self._origin = self._mode.warmup  # steps before the first of a round
        self._schedule = Schedule.of(self._mode)
        self._error = _unsafe(self._mode, optimizer, self._named)
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._fragments = {} if self._error else dict(self._make_fragments(trained))

    def _make_fragments(
        self, trained: Sequence[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[int, Fragment]]:
        """Yield each fragment with its number in the schedule."""
        sizes = [param.numel() for _, param in trained]
        for number, positions in enumerate(cut(sizes, self._schedule.fragments)):
            if positions:
                names = [trained[i][0] for i in positions]
                params = [trained[i][1] for i in positions]
                state_of = partial(self._state_of, params)
                exchange = self._owner.exchange
                yield number, make_fragment(self._mode, names, params, exchange, state_of)

    def _state_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the optimizer's state that is averaged with parameters."""
        optimizer = self._optimizer()
        if optimizer is None or not getattr(self._mode, "optimizer_state", False):
            return []
        return [
            value
            for param in params
            for value in _known_values(optimizer.state.get(param, {}))
            if isinstance(value, torch.Tensor)
            and value.shape == param.shape
            and value.is_floating_point()
        ]

    def trains(self, named: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Return whether these are its parameters, of which it trains the same as before."""
        same = len(named) == len(self._named) and all(
            one is other for (_, one), (_, other) in zip(named, self._named, strict=True)
        )
        return same and [param.requires_grad for _, param in named] == self._trained

    def compare(self) -> Callable[[], None]:
        """Start to compare with the other ranks; see [Note: what ranks compare].

        Returns:
            A function that ends it.
        """
        params: list[Param] = [
            (name, tuple(param.shape), str(param.dtype), param.requires_grad)
            for name, param in self._named
        ]
        settings = {
            "the optimizer": f"{self._class}, number {self.number},",
            "the number of its steps": str(self.steps),
            "the number of forwards outside no_sync()": str(self._owner.forwards),
            "the number of its averaged states": str(len(self._state_of(self._params()))),
        }
        statement = Statement(settings, params, self._error)
        return partial(self._end_comparison, self._owner.exchange.compare(statement))

    def _end_comparison(self, check: Callable[[], None]) -> None:
        try:
            check()
        except RankMismatchError as report:
            if self._error:
                raise ValueError(self._error) from report
            raise
        if self._error:
            raise ValueError(self._error)

    def _params(self) -> list[torch.Tensor]:
        return [param for _, param in self._named if param.requires_grad]

    def step(self) -> bool:
        """Count a step. Return whether it ends a round."""
        self.steps += 1
        step = self.steps - self._origin
        for fragment in self._fragments.values():
            if self.steps == self._mode.warmup:
                fragment.begin_rounds()
            if fragment.on_its_way and fragment.due == self.steps:
                fragment.merge()
        self._send([f for i, f in self._fragments.items() if self._schedule.sends(step, i)])
        return self._schedule.ends_round(step)

    def end_round(self) -> None:
        """Make all fragments the same on all ranks, and begin a round. Collective."""
        self.drain()
        if self.steps > self._origin:
            self._send(list(self._fragments.values()), last=True)
            self._origin = self.steps

    def drain(self) -> None:
        """Merge what is on its way."""
        for fragment in self._fragments.values():
            if fragment.on_its_way:
                fragment.merge()

    def _send(self, fragments: Sequence[Fragment], last: bool = False) -> None:
        if not fragments:
            return
        if last or self._schedule.overlap == 0:
            if self._owner.together(partial(self._average, fragments), last):
                for fragment in fragments:
                    fragment.merge(last)
            elif last:
                raise RuntimeError(
                    "end_round() cannot average: the other ranks have gone on without this one, "
                    "which was not there within patience, and takes part again from its next "
                    "forward on"
                )
            return
        check = self.compare()
        for fragment in fragments:
            fragment.send(check, self.steps + self._schedule.overlap)

    def _average(self, fragments: Sequence[Fragment]) -> None:
        """Average fragments, and merge none: all ranks do once all have all of them."""
        self.compare()()
        try:
            for fragment in fragments:
                fragment.send(lambda: None, self.steps)
            for fragment in fragments:
                fragment.arrive()
        except BaseException:
            for fragment in fragments:
                fragment.withdraw()
            raise

    def renewed(self) -> dict[str, Any]:
        """Return the state for other parameters, once nothing is on its way."""
        self.drain()
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        kept: FragmentState = {}
        due: dict[str, int] = {}
        for fragment in self._fragments.values():
            for kind, held in fragment.state().items():
                kept.setdefault(kind, {}).update(held)
            if fragment.on_its_way:
                due.update(dict.fromkeys(fragment.names, fragment.due))
        params = [name for name, _ in self._named]
        origin = self._origin
        return {"params": params, "steps": self.steps, "origin": origin, "kept": kept, "due": due}

    def load(self, state: State) -> None:
        """Go on from what `state()` has returned."""
        self.steps, self._origin = int(state["steps"]), int(state["origin"])
        for fragment in self._fragments.values():
            fragment.load(state["kept"], state["due"].get(fragment.names[0], 0))


def _known_values(state: State) -> Iterator[Any]:
    """Yield the values of a parameter's state, by name. `zero` may leave numbers to their owner."""
    for name in sorted(state):
        with suppress(RuntimeError):
            yield state[name]


def _run(task: Callable[[], None], waits: bool) -> bool:
    task()
    return True


def make_rounds(
    mode: SyncMode,
    params: Sequence[NamedParam],
    group: dist.ProcessGroup,
    on_round: Callable[[], None],
    nodes: Nodes | None,
    elastic: bool = False,
) -> Rounds:
    """Return the rounds of a model whose ranks are those of `group`. Collective.

    Args:
        nodes: the ranks that average their gradients at every step, and those that average
            parameters; None: each rank averages parameters with all.
        elastic: the ranks of the group may change. Then it carries the averages, beside which it
            carries nothing.
    """
    own, apart, parts = OwnGroups(), group, None
    if group.size() > 1 and not elastic:
        apart = new_part(group, group.size(), "averages of sync=", own)
    if nodes is not None:
        cross = new_group(group, nodes.cross_ranks, "averages between parts", own)
        inside = new_group(group, nodes.node_ranks, "averages within a part", own)
        parts = Parts(cross, inside)
    exchange = Exchange(apart, group, params[0].tensor.device, parts)
    rounds = Rounds(mode, params, exchange, on_round)
    own.end_with(rounds)
    return rounds


def rounds_of(rounds: Rounds | None, states: Sequence[State], rank: int, world: int) -> State:
    """Return the rounds that rank `rank` of `world` goes on with, from the states of the old ranks.

    With another number of ranks, what codes have lost is dealt out as by `sync_checkpoint.deal`.

    Raises:
        ValueError: they do not fit the model.
    """
    given = [state["rounds"] for state in states if "rounds" in state]
    if rounds is None and given:
        raise ValueError(
            f"the state is one of sync={given[0]['mode']}, but the model averages gradients at "
            "every step; wrap it with that mode"
        )
    if rounds is None:
        return {}
    if len(given) < len(states):
        raise ValueError(
            f"the state holds no rounds, but the model has sync={rounds.mode.describe()}; load "
            "what sync_state_dict() returned with this mode"
        )
    if rounds.mode.part_size > 1 and len(states) > 1:
        raise ValueError(
            f"sync={rounds.mode.describe()} goes on with the same groups of ranks; pass each "
            "rank's own state, and not a list"
        )
    for state in given:
        rounds.check(state)
    by_rank = {int(state["rank"]): state["rounds"] for state in states}
    if len(states) == 1 or len(by_rank) == world:
        mine: State = by_rank.get(rank, given[0])
        return mine
    return _dealt([by_rank[old] for old in sorted(by_rank)], rank, world)


def _dealt(old: Sequence[State], rank: int, world: int) -> State:
    optimizers = []
    for number, first in enumerate(old[0]["optimizers"]):
        if first["due"] or first["steps"] > first["origin"]:
            raise ValueError(
                "the states are those of another number of ranks within a round, whose parameters "
                "differ; save after model.end_round() to go on with more or fewer ranks"
            )
        kept = dict(first["kept"])
        if "residual" in kept:
            owed = [state["optimizers"][number]["kept"]["residual"] for state in old[rank::world]]
            zero = {name: torch.zeros_like(held) for name, held in kept["residual"].items()}
            # An average is owed what each rank owes, divided by their number.
            share = world / len(old)
            kept["residual"] = {n: share * sum((o[n] for o in owed), zero[n]) for n in zero}
        optimizers.append({**first, "kept": kept})
    return {**old[0], "optimizers": optimizers}


def _unsafe(mode: SyncMode, optimizer: Optimizer, named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return why parameters of an optimizer cannot be averaged in a mode; empty if they can."""
    described = f"sync={mode.describe()}"
    coded = isinstance(mode, DiLoCo) and mode.codec is not None
    for name, param in named:
        if not param.is_floating_point():
            return f"{described} averages real numbers, but {name!r} is {param.dtype}"
        if coded and param.dtype is torch.float64:
            return (
                f"{described}: differences are coded in fp32, but {name!r} is {param.dtype}; use "
                "wire='fp32'"
            )
    kind = type(optimizer)
    if isinstance(mode, Delayed) and not (is_elementwise(optimizer) or kind in _TENSORWISE):
        return (
            f"{described} moves parameters after each step by what other ranks have changed, and "
            f"{kind.__module__}.{kind.__qualname__} may remember where it left them (as LBFGS "
            "does); use an optimizer of torch whose update follows from gradient and state, such "
            "as SGD with momentum or AdamW, or sync=LocalSGD(...) or DiLoCo(...)"
        )
    return ""
