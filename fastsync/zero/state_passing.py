"""States that `catch_up()` was given, on their way to a rank that comes back.

Of a sharded optimizer no rank has the whole state to give, and collecting it would take all ranks,
whose next collective is another one. So a rank that trains gives the optimizer's settings, and says
that it has been sharded. The rank that comes back shards its own optimizer, as blank as the script
made it, with the number and the steps that the others have. Then all cut the state anew:
fastsync/zero/neighbour_copies.py.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from fastsync.zero.sharded_optimizer import ShardedOptimizer, ShardedOptimizers


class Stateful(Protocol):
    """An optimizer, a scheduler, a sampler: anything with a state that can be loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass(frozen=True)
class _Taken:
    """An optimizer that has been taken over.

    Attributes:
        place: which one it is of those in what `catch_up()` was given.
        number: of those that have been taken over.
        steps: that it has made since.
        version: of its state, see `Gate`.
        blank: it has no state yet.
        buffers: which of the model's parameters lie in each, and whether each has one owner.
    """

    place: int
    number: int
    steps: int
    version: int
    blank: bool
    buffers: list[tuple[list[int], bool]]


class Passing:
    """Transfer of the states of one model.

    Args:
        states: objects whose state a rank that comes back needs beside the module.
        sharded: the optimizers; None where every rank has the whole state.
    """

    def __init__(self, states: Sequence[Stateful], sharded: ShardedOptimizers | None) -> None:
        self.states, self._sharded = list(states), sharded
        # Libraries wrap optimizers in others. A scheduler has one, too.
        found = (each for s in states for each in (s, getattr(s, "optimizer", None)))
        self._optimizers = list(dict.fromkeys(o for o in found if isinstance(o, Optimizer)))

    def give(self) -> dict[str, Any]:
        """Return what `take` expects.

        Raises:
            ValueError: the ranks step with an optimizer that `catch_up()` was not given.
        """
        sharded = self._sharded
        if sharded is None:
            return {"states": [state.state_dict() for state in self.states]}
        with sharded.settings_alone() as saved:
            states = [state.state_dict() for state in self.states]
        if self._unknown(saved):
            gc.collect()  # what a script has dropped may be left in a cycle
        for optimizer in self._unknown(saved):
            raise ValueError(
                f"the ranks share the state of an optimizer, {optimizer}, which catch_up() was not "
                "given: pass every optimizer of the model, itself and not only what contains it"
            )
        return {"states": states, "taken": self._taken(), "count": sharded.taken}

    def take(self, given: dict[str, Any]) -> None:
        """Load what another rank gives, except sharded state. It may be done again.

        Raises:
            ValueError: it does not fit.
        """
        if self._sharded is not None:
            self._sharded.forget()
        try:
            for state, theirs in zip(self.states, given["states"], strict=True):
                state.load_state_dict(theirs)
        except Exception as error:  # trying again would not help
            raise ValueError(f"what the others gave does not fit: {error}") from error
        if self._sharded is not None:
            for each in given["taken"]:
                self._attach(self._sharded, each)
            self._sharded.taken = given["count"]

    def _attach(self, owner: ShardedOptimizers, taken: _Taken) -> None:
        sharded = owner.attach(self._optimizers[taken.place])
        if self._buffers(sharded, owner) != taken.buffers:
            raise ValueError(
                "what the others gave does not fit: their optimizers have other parameters, or in "
                "another order; make the optimizers as the script does at the start"
            )
        sharded.number, sharded.steps, sharded.blank = taken.number, taken.steps, taken.blank
        sharded.shares.gate.version = taken.version
        sharded.serve()

    def _unknown(self, saved: Collection[int]) -> list[str]:
        """Return the classes of those that have been taken over, but cannot be passed on."""
        assert self._sharded is not None
        return [
            type(optimizer).__name__
            for optimizer, sharded in self._sharded.known()
            if sharded.number not in saved or not any(optimizer is o for o in self._optimizers)
        ]

    def _taken(self) -> list[_Taken]:
        owner = self._sharded
        assert owner is not None
        found = {id(optimizer): sharded for optimizer, sharded in owner.known()}
        taken = []
        for place, optimizer in enumerate(self._optimizers):
            if sharded := found.get(id(optimizer)):
                buffers = self._buffers(sharded, owner)
                facts = (sharded.number, sharded.steps, sharded.shares.gate.version, sharded.blank)
                taken.append(_Taken(place, *facts, buffers))
        return taken

    @staticmethod
    def _buffers(
        sharded: ShardedOptimizer, owner: ShardedOptimizers
    ) -> list[tuple[list[int], bool]]:
        index_of = owner.index_of
        return [([index_of[id(p)] for p in s.params], s.sharing.whole) for s in sharded.buffers]
