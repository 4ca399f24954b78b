"""Ranks that come back to a training that goes on, or join it: `model.catch_up(optimizer)`.

One return, with four ranks of which rank 2 was killed in step 7:

1. The launcher starts rank 2 again, as the only rank of a process group in a store of its own. It
   imports its modules, wraps its model and makes its optimizer; the others know nothing of that.
2. In catch_up() it reads what those that train have said of the training. With another model or
   other settings it raises an error, alone. Otherwise it announces itself in the store, and waits.
3. Rank 0, or the first of those that are left, looks at the store a few times per second. It finds
   rank 2 there, alive, and calls the others: before its forward of step 30 it says so in the store.
   All others look there after the vote that ends step 30, which rank 0 has had to take part in. So
   all meet before their forward of step 31, as survivors do. The one that decides names rank 2.
4. All four make a group and watch each other. Rank 0 sends rank 2 its state after step 30; the
   others wait for them, with a plan for four ranks.
5. catch_up() returns 30 on rank 2. Step 31 is an average over four ranks.

A rank that joins does the same. It has a number that no rank has had.

A rank that ends on the way back is left out: those that train meet again, without it. So is one
that was coming back when another died; it announces itself again.

What is given: parameters and which of them are trained, buffers, the objects that were passed to
catch_up(), how many steps there were, in which order gradients become ready, and what they travel
as. With `zero` no rank has an optimizer's whole state: all cut it anew, as they do after a death,
as fastsync/zero/neighbour_copies.py describes. No error feedback is given: what the averages lack
is the sum of what the ranks keep back, and the others have all of it. A rank that comes back begins
with nothing.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fastsync._torch import set_group_timeout
from fastsync.config.topology import Network
from fastsync.ddp.elastic_training import Elastic
from fastsync.faults.consensus import RankMismatchError, Statement, find_difference
from fastsync.faults.join_gate import JoinGate, Waiting, back_key
from fastsync.faults.survivors import Decision
from fastsync.reducer.engine import Engine, Progress
from fastsync.reducer.monitor import open_watch, watch_of
from fastsync.reducer.optimizer_hooks import StepWatcher, params_of, watch_steps
from fastsync.reducer.state_transfer import give, receive
from fastsync.zero.state_passing import Passing

_log = logging.getLogger("fastsync")


@dataclass(frozen=True)
class _Training:
    """Facts that a rank that comes back needs before it announces itself.

    Attributes:
        place: place where the ranks that train meet.
        statement: statement of their model and settings.
    """

    place: str
    statement: Statement

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str) -> _Training:
        call = json.loads(text)
        stated = call["statement"]
        params = [(name, tuple(shape), *rest) for name, shape, *rest in stated["params"]]
        return cls(call["place"], Statement(stated["settings"], params))


class Returns(StepWatcher):
    """Return of ranks to the training of one model, on a rank that is in it or comes back.

    Args:
        module: that was wrapped.
        engine: of it.
        elastic: the object that meets the other ranks.
        passing: what a rank that comes back needs beside the module.

    Raises:
        ValueError: this process has such an object of another model.
    """

    def __init__(
        self, module: nn.Module, engine: Engine, elastic: Elastic, passing: Passing
    ) -> None:
        identity = elastic.identity
        if identity.store.add(f"models/{identity.rank}-{identity.process}", 1) > 1:
            raise ValueError(
                "catch_up() of a second model: ranks come back to trainings of one model only"
            )
        self._module, self._engine, self._elastic = module, engine, elastic
        self._passing, self._store = passing, identity.store
        self._doorway = JoinGate(self._store)
        self._looks = True  # the store is there
        self._stepped = -1  # the averages that there were when an optimizer stepped
        self._looked = -1  # and when this rank last looked for a call
        self._joins: dist.ProcessGroup | None = None  # what this rank is about to be in
        self._ours = {id(param.tensor) for param in engine.params}
        self._lates = 0  # times that the others have gone on without this rank
        elastic.may_return = True
        me = weakref.proxy(self)  # no caller of this is to keep it
        elastic.place.waiting = lambda: me._doorway.waiting(())
        elastic.invite = lambda *found: me._doorway.admit(*found)
        elastic.hand_over = lambda *found: me._hand_over(*found)
        engine.on_step = lambda core: me.before_forward()
        watch_steps(self)

    def take_part(self, settings: Sequence[str]) -> None:
        """Let ranks come back from now on, or come back.

        Args:
            settings: in which the ranks have to agree, beside their policies.

        Raises:
            RankMismatchError, SyncFault: on a rank that comes back.
        """
        if self._elastic.identity.returns:
            self._come_back(settings)
        else:
            self._begin(settings)

    def _begin(self, settings: Sequence[str]) -> None:
        training = _Training(self._elastic.place.name, self._statement(settings))
        self._doorway.describe(training.encoded())

    def _come_back(self, settings: Sequence[str]) -> None:
        """Return once this rank is one of those that train, and has what they have.

        Raises:
            RankMismatchError: they train another model, or with other settings.
            SyncFault: they do not take it in.
        """
        elastic, identity = self._elastic, self._elastic.identity
        waiting = Waiting(self._store, identity.rank, elastic.timeout.total_seconds())
        training = _Training.decoded(waiting.training())
        difference = find_difference(training.statement, self._statement(settings))
        if difference:
            raise RankMismatchError(
                f"rank {identity.rank} was started while others train, but differs from them: "
                f"{difference}"
            )
        elastic.place.name = training.place
        self._wait_and_join(waiting)
        self._store.set(back_key(identity.process), "")

    def come_back_if_late(self) -> None:
        """Come back where the others have gone on without this rank, which was too slow.

        Raises:
            SyncFault: they do not take it in, or end before.
        """
        elastic, rank = self._elastic, self._elastic.identity.rank
        if not elastic.left_out:
            return
        self._lates += 1
        elastic.step_aside(self._lates)
        self._wait_and_join(Waiting(self._store, rank, elastic.timeout.total_seconds()))
        elastic.left_out = False
        self._looked = elastic.steps  # the others have looked for this call

    def _wait_and_join(self, waiting: Waiting) -> None:
        alone = self._engine.group
        while not self._joined(waiting.admitted()):
            _log.warning(
                "fastsync: rank %d was being taken in when others ended (%s); it tries again",
                waiting.rank,
                self._elastic.obstacle,
            )
            self._engine.use_group(alone)

    def _joined(self, epoch: int) -> bool:
        joined = False
        try:
            joined = self._elastic.join(epoch)
        finally:
            watch = None if self._joins is None else watch_of(self._joins)
            if not joined and watch is not None:
                watch.leave("raises", "it could not take over what the others have")
                watch.close()
        return joined

    def before_forward(self) -> None:
        """Look for ranks before a forward that is to synchronise, and admit them if all were
        called.
        """
        self.come_back_if_late()
        elastic, steps = self._elastic, self._elastic.steps
        # With `sync` forwards may follow an average before the next one.
        begins, self._looked = self._looked < steps == self._stepped, steps
        try:
            # Called before the average that was the last, so that all of its ranks find the call.
            called = self._looks and begins and steps > 0 and self._is_called(steps - 1)
            looks = self._looks and not called and elastic.now.rank == 0
            if looks and self._sees_somebody():
                self._store.add(f"call/{steps}", 1)
        except RuntimeError as error:
            self._looks = called = False
            _log.warning("fastsync: nobody can come back: the store has gone (%s)", error)
        if called:
            elastic.admit()
        self.come_back_if_late()

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped on the averages of a backward."""
        if any(id(param) in self._ours for param in params_of(optimizer)):
            self._stepped = self._elastic.steps

    def _is_called(self, steps: int) -> bool:
        return self._store.check([f"call/{steps}"])

    def _sees_somebody(self) -> bool:
        return self._doorway.somebody_waits(self._elastic.now.ranks)

    def _statement(self, settings: Sequence[str]) -> Statement:
        policy = self._engine.policy
        stated = {f.name: str(getattr(policy, f.name)) for f in fields(policy)}
        buffers = [(name, tuple(b.shape), str(b.dtype)) for name, b in self._module.named_buffers()]
        stated |= {
            "torch": torch.__version__,
            "bucket_cap_mb": ", ".join(settings),
            "the module's buffers": str(buffers),
            "what catch_up() is given": ", ".join(type(s).__name__ for s in self._passing.states),
        }
        tensors = [(p.name, p.tensor) for p in self._engine.params]
        params = [(name, tuple(t.shape), str(t.dtype), True) for name, t in tensors]
        return Statement(stated, params)

    def _hand_over(self, group: dist.ProcessGroup, decision: Decision) -> None:
        """Exchange state with joining ranks, on all ranks that are about to make `group`, once they
        have it.

        Raises:
            RuntimeError: it does not succeed on every rank.
        """
        joining, me = dict(decision.joining), self._elastic.identity.rank
        self._joins, refusal = group, open_watch(group)
        if refusal:
            raise RuntimeError(f"ranks that come back cannot be looked out for: {refusal}")
        set_group_timeout(group, self._elastic.timeout)
        senders = decision.survivors
        for number, joining_rank in enumerate(joining):
            sender = senders[number % len(senders)]
            if sender == me:
                give(self._held, group, decision.ranks.index(joining_rank))
            elif joining_rank == me:
                self._take(receive(group, decision.ranks.index(sender)))

    def _held(self) -> dict[str, Any]:
        engine = self._engine
        network, rounds = engine.measured(), self._elastic.rounds
        return {
            "parameters": {p.name: p.tensor for p in engine.params},
            "trained": [p.tensor.requires_grad for p in engine.params],
            "buffers": dict(self._module.named_buffers()),
            "states": self._passing.give(),
            "steps": engine.core.steps(),
            "order": [engine.params[i].name for i in engine.next_order()],
            "network": (network.rate, network.latency),
            "wire": engine.wire,
            "averages": self._elastic.averages,
            "rounds": None if rounds is None else rounds.state(),
        }

    def _take(self, given: dict[str, Any]) -> None:
        """Take all of it, or raise an error of this rank alone, which the
        others learn as its end.
        """
        engine = self._engine
        with torch.no_grad():
            for param, trained in zip(engine.params, given["trained"], strict=True):
                param.tensor.copy_(given["parameters"][param.name])
                param.tensor.requires_grad_(trained)
            for name, buffer in self._module.named_buffers():
                buffer.copy_(given["buffers"][name])
        self._passing.take(given["states"])
        if given["wire"] != engine.wire:
            engine.set_wire(given["wire"])
        self._elastic.averages = given["averages"]
        if self._elastic.rounds is not None:
            self._elastic.rounds.join(given["rounds"])
        progress = Progress(given["steps"], given["order"], Network(*given["network"]))
        engine.resume(progress, residuals={}, follows=True)
