"""A training that survives deaths of ranks: `FastDDP(model, faults=Faults(elastic=True))`.

csrc/reducer/survival.h says when a step is committed, what each rank keeps until then, and
what differs on GPUs; fastsync/faults/survivors.py how the survivors agree. One death, with four
ranks:

1. Rank 2 is killed in its backward of step 7. Rank 0 and 1 wait there for its gradients, rank 3
   still computes. The fault watch tells all of them within a tenth of a second.
2. Ranks 0 and 1 meet in epoch 1. So does rank 3, when it has got to the end of its backward, or
   cannot send a bucket. None of them has all averages of step 7, so no rank can have used any.
3. They restore their own gradients of step 7, and make a group of their own, whose rank 0 tells the
   order of the buckets. Over that group they open a fault watch, share memory, plan, and tell each
   other through the store that they have: from then on the new watch tells of every death.
4. They average step 7 again, over three ranks. backward() returns.

Had rank 2 died later, in its vote, the survivors might all have had the averages of step 7. They
would have used those: rank 2 may have used them, too, and saved its weights.

With `sync` the ranks notice at their next average of parameters, and average what they have then.
They vote likewise before any of them merges an average: `Elastic.average`. With `patience` they
meet in the store before it, and as after a death where one of them has not come in time. That rank
finds what they have decided, and comes back as a rank does that was started again.

With `zero`, they share the state of optimizers anew before they tell each other through the store:
fastsync/zero/neighbour_copies.py.
fastsync/ddp/rejoin.py says how rank 2 comes back.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch import nn

from fastsync._build.env import NCCL_LETS_LIVE, Env
from fastsync._torch import (
    Front,
    break_group,
    connect_group,
    default_group,
    group_store,
    group_timeout,
    is_gloo,
    keep_for_good,
    make_group,
    renewed_backend,
    set_group_timeout,
)
from fastsync.config.fault_policies import ElasticPolicy
from fastsync.ddp.ddp_objects import DDPReducer
from fastsync.ddp.rank_identity import RankIdentity
from fastsync.faults.consensus import RankMismatchError
from fastsync.faults.stores import served_at
from fastsync.faults.survivors import Decision, Patience, RankState, Survivors
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import watch_of, watched_call
from fastsync.reducer.weak_calls import weakly
from fastsync.sync.rounds import Rounds
from fastsync.zero.neighbour_copies import Neighbours
from fastsync.zero.sharded_optimizer import ShardedOptimizers

if TYPE_CHECKING:
    from fastsync.reducer.core import FaultWatch, Reducer

_log = logging.getLogger("fastsync")
_FAILS, _TAKES, _AGAIN = 0, 1, 2  # as csrc/reducer/survival.h numbers verdicts
_CERTAINTY = 2.0  # seconds until a death that a backend's error tells of is known to the watch
_PATIENCE = timedelta(seconds=10)  # for each collective of ranks that rebuild
_PAUSE = 0.01
_AT_ONCE = 1.0  # seconds in which ranks that have waited in vain for another one meet
_CONNECTING = "the connecting of the ranks that are left"


@dataclass(frozen=True)
class Membership:
    """The ranks that train, and since when.

    Attributes:
        rank: this one's place among them, from 0.
        ranks: those of the start that are left or have come back, as they were counted then; and
            those that have joined since, whose numbers follow.
        epoch: 0 at the start; each death makes a later one, and so do ranks that come back or join.
        since: the first step, from 1, whose averages are theirs alone.
        group: their process group. That of the start is broken once a rank has died.
    """

    rank: int
    ranks: tuple[int, ...]
    epoch: int
    since: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Return how many ranks train."""
        return len(self.ranks)


class _LeftOut(Exception):
    """The others have gone on without this rank, which came too late."""


class Elastic:
    """Response of one model to the death of ranks.

    Attributes:
        now: the ranks that train.
        place: place where survivors meet. A rank that comes back is told its name.
        rounds: when parameters are averaged, with `sync`.
        averages: of parameters that all ranks have had.
        left_out: the others average without this rank, which has come too late, until it has come
            back.
        may_return: `catch_up()` has been called, so that ranks can come back.
        invite: called with ranks that come back and are members of an epoch, on the others.
        hand_over: called when ranks come back, with the group of all of them and with their ranks:
            sends them what they need, or receives it.
    """

    def __init__(
        self,
        model: Front,
        engine: Engine,
        policy: ElasticPolicy,
        identity: RankIdentity,
        sharded: ShardedOptimizers | None,
        rounds: Rounds | None,
    ) -> None:
        self.rounds, self.averages, self._in_average = rounds, 0, False
        self.left_out = self.may_return = False
        self._last_place = ""  # where all have met before an average
        group = engine.group
        self._model, self._engine, self._policy = weakref.ref(model), engine, policy
        self.identity, self._me, self._started = identity, identity.rank, identity.started
        self.timeout = group_timeout(group) or timedelta(minutes=30)
        checksum = zlib.crc32("\n".join(p.name for p in engine.params).encode())
        name = f"elastic-{group.group_name}-{checksum}"
        opened = "to be told" if identity.returns else ""
        self.place = Survivors(identity.store, name, self._me, opened)
        self._watches: list[tuple[FaultWatch, dict[int, int]]] = []  # ranks by their places in it
        self._decision: Decision | None = None
        self._epoch = self._done = 0
        self._neighbours = None if sharded is None else Neighbours(sharded)
        self._obstacle: RuntimeError | None = None  # that the last attempt to rebuild has met
        self.invite: Callable[[dict[int, int], int], None] = lambda joining, epoch: None
        self.hand_over: Callable[[dist.ProcessGroup, Decision], None] = lambda group, who: None
        ranks = (self._me,) if identity.returns else tuple(range(self._started))
        self.now = Membership(group.rank(), ranks, 0, 1, group)
        self._see(group, ranks)

    def meet(self, steps: int, complete: bool, error: str) -> int:
        """Rebuild after a death, when the reducer waits in vain. Collective of the ranks that are
        left.

        Returns:
            A verdict.

        Raises:
            SyncFault: the training cannot go on.
        """
        if not self._knows_of_death():
            return _FAILS
        return self._meet(RankState(steps, complete))

    def rebuild(self) -> None:
        """Rebuild after a death between two steps. Collective of the ranks that are left.

        Raises:
            SyncFault: the training cannot go on.
        """
        self._rebuild(between=False)

    def admit(self) -> None:
        """Admit ranks that have come back, between two steps. Collective.

        Raises:
            SyncFault: the training cannot go on.
        """
        try:
            self._meet(RankState(self.steps, False, between=True))
            if self._decided.joining or self._decided.ranks != self.now.ranks:
                self._rebuild(between=True)
        except _LeftOut:
            self.left_out = True

    def step_aside(self, attempt: int) -> None:
        """Become as a rank that was started again: alone, and without knowledge of the others.

        Args:
            attempt: a number that this rank has not come back with before.
        """
        store, name = self.identity.store, f"{self.place.name}-aside-{self._me}-{attempt}"
        backend = renewed_backend(self._engine.group) or "gloo"
        members = [self.identity.member(self._me)]
        self._watches.clear()
        self._engine.use_group(make_group(store, 0, members, name, _PATIENCE, backend))

    def join(self, epoch: int) -> bool:
        """Return whether this rank, which has come back, is a member of the
        epoch that it was told.
        """
        self._epoch, self._decision = epoch, self.place.decided(epoch)
        return self._is_rebuilt()

    @property
    def obstacle(self) -> RuntimeError | None:
        """Return the error that the last attempt met."""
        return self._obstacle

    def _rebuild(self, between: bool) -> None:
        before = self.now
        while not self._is_rebuilt():
            # A rank that was coming back may have ended before the others began to watch it.
            if not self._decided.joining and not self._knows_of_death():
                raise SyncFault(
                    f"fastsync: rank {self._me} could not connect with ranks "
                    f"{list(self._decided.ranks)} after others had died. Restart from a checkpoint"
                ) from self._obstacle
            self._meet(RankState(self.steps, False, between))
        self._say(before)

    def during(self, task: Callable[[], None]) -> None:
        """Run what all ranks do together between two steps. After a death, rebuilding does it."""
        try:
            task()
        except RuntimeError as error:
            if self.meet(self.steps, False, str(error)) == _FAILS:
                raise
            self.rebuild()

    @property
    def steps(self) -> int:
        """Return the averages that all ranks have had, of gradients and of parameters."""
        return self._engine.core.steps() + self.averages

    def average(self, task: Callable[[], None], waits: bool) -> bool:
        """Run an average of parameters, until all that are left have it. Collective.

        They vote as they do in a backward: csrc/reducer/survival.h. None uses it before.

        Args:
            waits: for every rank, however slow.

        Returns:
            Whether it is to be used: not, if this rank is left out.

        Raises:
            SyncFault: the training cannot go on.
        """
        patience = None if waits else self._patience
        if not self.left_out:
            try:
                self._average(task, patience)
            except _LeftOut:
                self.left_out, self._in_average = True, False
        return not self.left_out

    def _average(self, task: Callable[[], None], patience: Patience | None) -> None:
        self._in_average = True
        verdict = self._try_average(task, patience)
        while verdict == _AGAIN:
            self.rebuild()
            verdict = self._try_average(task, patience)
        self._in_average = False
        self.averages += 1
        if verdict == _TAKES:
            self.rebuild()

    @property
    def _patience(self) -> Patience | None:
        """Return how long others are waited for before and after an average."""
        seconds, rounds = self._policy.patience, self.rounds
        if seconds is None or rounds is None or not rounds.local:
            return None
        if not self.may_return:
            raise RuntimeError(
                f"elastic: patience={seconds:g} leaves slow ranks out until they come back, which "
                "needs model.catch_up(optimizer) before the first step, on every rank, and `python "
                "-m fastsync.elastic`"
            )
        return Patience(seconds, self._policy.min_ranks)

    def _try_average(self, task: Callable[[], None], patience: Patience | None) -> int | None:
        """Return a verdict; None: all ranks have the average."""
        assert self.rounds is not None
        if patience is not None:
            place = f"{self._epoch}/average-{self.averages}"
            if not self.place.gather(place, self.now.ranks, self._gone, patience):
                # All others that were there come at once.
                short = replace(patience, seconds=min(patience.seconds, _AT_ONCE))
                return self._meet(RankState(self.steps, False), short)
            self._forget_place(place)
        complete = False
        try:
            task()
            complete = True
            self.rounds.exchange.vote()
        except RankMismatchError:
            raise
        except RuntimeError as error:
            verdict = self.meet(self.steps, complete, str(error))
            if verdict == _FAILS:
                raise
            return verdict
        return None

    @property
    def _decided(self) -> Decision:
        assert self._decision is not None
        return self._decision

    @property
    def _present(self) -> tuple[int, ...]:
        """Return the ranks of the last decision; of ranks that come back only those that are
        members now.
        """
        return self.now.ranks if self.now.epoch == self._epoch else self._decided.survivors

    def _see(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        if not is_gloo(group):
            keep_for_good(group)  # its end would abort it, while others may still use it
        watch = watch_of(group)
        if watch is not None:
            watch.survive()
            self._watches.append((watch, dict(enumerate(ranks))))

    def _gone(self) -> dict[int, str]:
        """Return the ranks that have ended so far, and how each ended."""
        found: dict[int, str] = {}
        for watch, ranks in self._watches:
            for rank, reason in watch.gone():
                if rank in ranks:
                    found.setdefault(ranks[rank], reason.removeprefix(f"rank {rank} "))
        found.pop(self._me, None)
        return found

    def _knows_of_death(self) -> bool:
        """Return whether a rank has ended since the last decision."""
        present = self._present
        deadline = time.monotonic() + _CERTAINTY
        while time.monotonic() < deadline:
            if any(rank in present for rank in self._gone()):
                return True
            time.sleep(_PAUSE)
        return False

    def _forget_place(self, place: str) -> None:
        """Let the store forget the meeting before the one at `place`, to which all have come."""
        if self.now.rank == 0 and self._last_place:
            self.place.forget(self._last_place)
        self._last_place = place

    def _meet(self, mine: RankState, patience: Patience | None = None) -> int:
        before = self._present
        self._epoch += 1
        timeout = self.timeout.total_seconds()
        patience = patience or self._patience
        decision = self.place.meet(self._epoch, before, mine, self._gone, timeout, patience)
        if self._me not in decision.ranks:
            if self._policy.patience is not None:
                raise _LeftOut
            raise SyncFault(
                f"fastsync: ranks {list(decision.ranks)} could not reach rank {self._me} and went "
                "on without it. Look at its network"
            )
        if len(decision.ranks) < self._policy.min_ranks:
            raise SyncFault(
                f"fastsync: {self._losses(before, decision.ranks)}. The ranks that are left, "
                f"{list(decision.ranks)}, are fewer than min_ranks={self._policy.min_ranks}. "
                "Restart from a checkpoint"
            )
        self._decision = decision
        return _TAKES if mine.steps < decision.steps else _AGAIN

    def _losses(self, before: Collection[int], left: Collection[int]) -> str:
        gone, other = self._gone(), "has ended"
        if self._policy.patience is not None:
            other = f"was not there within patience={self._policy.patience:g} s"
        lost = [rank for rank in before if rank not in left]
        return "; ".join(f"rank {rank} {gone.get(rank, other)}" for rank in lost)

    def _is_rebuilt(self) -> bool:
        """Return whether the survivors average among themselves; not, where another has died
        meanwhile.
        """
        ranks, back = self._decided.ranks, dict(self._decided.joining)
        for _, seen in self._watches:  # how those ended before is over
            for place in [place for place, rank in seen.items() if rank in back]:
                del seen[place]
        group = None
        try:
            if self._me not in back:
                self.invite(back, self._epoch)
            group = self._make_group(ranks)
            if back:
                self.hand_over(group, self._decided)
            self._engine.use_group(group, agreed=False)
            device = self._engine.params[0].tensor.device
            watched_call(group, _CONNECTING, partial(connect_group, group, device))
            self._see(group, ranks)
            set_group_timeout(group, self.timeout)
            self._engine.routes.set_timeout(self.timeout)
            if self._neighbours is not None:
                self._neighbours.prepare(ranks, group.rank(), self._decided.survivors)
        except RuntimeError as error:
            self._obstacle = error
            if group is not None:
                keep_for_good(group)
            return False
        self._check_shares()
        if not self.place.gather(f"{self._epoch}/ready", ranks, self._gone):
            return False
        self._use(group, ranks)
        return True

    def _check_shares(self) -> None:
        """Raise a `SyncFault` where a share of an optimizer's state has died with its ranks."""
        if self._neighbours is None or not self._neighbours.lost:
            return
        owner, holder = self._neighbours.lost[0]
        pair = {rank for pair in self._neighbours.lost for rank in pair}
        losses = self._losses(sorted(pair), ())
        raise SyncFault(
            f"fastsync: {losses}. Only ranks {owner} and {holder} had rank {owner}'s share of the "
            f"optimizer's state under zero={self._engine.policy.zero.stage}, so it is lost. "
            "Restart from a checkpoint",
            sorted(pair),
        )

    def share_late(self) -> None:
        """Share what was left for the end of a step. Collective of the ranks that are left."""
        assert self._neighbours is not None
        self._neighbours.prepare_late()
        if not self.place.gather(f"{self._epoch}/late", self.now.ranks, self._gone):
            raise RuntimeError("a rank has ended before all were ready to go on")
        self._neighbours.install()

    def _make_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        old = self._engine.group
        break_group(old)
        self._engine.shares.outlive()
        members = [self.identity.member(rank) for rank in ranks]
        name, backend = f"{self.place.name}-{self._epoch}", renewed_backend(old) or "gloo"
        me = ranks.index(self._me)
        return make_group(self.identity.store, me, members, name, _PATIENCE, backend)

    def until_all(self, task: Callable[[], None]) -> None:
        """Run what all ranks do together, until all that are left have done it.

        A rank that has gone on could not be called back.
        """
        done = False

        def attempt() -> None:
            nonlocal done
            task()
            place = f"{self._epoch}/done-{self._done}"
            if not self.place.gather(place, self.now.ranks, self._gone):
                raise RuntimeError("a rank has ended before all were ready to go on")
            done = True

        while not done:
            self.during(attempt)
        self._done += 1

    def _use(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        if self._neighbours is not None:
            self._neighbours.install()
        if self._policy.rescale == "sum_of_start":
            self._engine.set_divisor(float(self._started))
        if self.rounds is not None:
            self.rounds.exchange.use_group(group)
        place, since = ranks.index(self._me), self._next_step
        self.now = Membership(place, ranks, self._epoch, since, group)
        self._done = 0  # as on a rank that comes back
        model = self._model()
        if model is not None:
            model.process_group = group

    @property
    def _next_step(self) -> int:
        """Return the step, from 1, that the ranks average next, or are averaging."""
        if self.rounds is None or not self.rounds.local:
            return self._engine.core.steps() + 1
        return max(1, self.rounds.steps + (not self._in_average))

    def _say(self, before: Membership) -> None:
        if self.now.rank != min(self.now.ranks.index(rank) for rank in self._decided.survivors):
            return
        lost = self._losses(before.ranks, self.now.ranks)
        new = [rank for rank in self.now.ranks if rank not in before.ranks]
        verbs = ("is back" if rank < self._started else "has joined" for rank in new)
        changes = [lost, *(f"rank {rank} {verb}" for rank, verb in zip(new, verbs, strict=True))]
        nothing = "a rank that was being taken in has ended, or one was late"
        text = "; ".join(filter(None, changes)) or nothing
        left, step = list(self.now.ranks), self.now.since
        _log.warning("fastsync: %s. Ranks %s go on with step %d", text, left, step)


def _refuse(reducer: Reducer) -> None:
    """Refuse a forward of a rank that comes back or joins, and is alone."""
    raise RuntimeError(
        "this rank was started while others train, and does not know what they do: "
        "call model.catch_up(optimizer) before the first step, on every rank"
    )


def _unfit(module: nn.Module, engine: Engine, delays: bool, broadcasts: bool) -> list[str]:
    """Return what of model and ranks cannot be survived, with the remedy.

    Args:
        delays: torch's front reduces gradients itself.
        broadcasts: rank 0 broadcasts its buffers before each forward.
    """
    layers = [n for n, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    found = {
        f"SyncBatchNorm, as layer {layers[:1]} is: its forward waits for all ranks; use "
        "BatchNorm": bool(layers),
        "buffers that rank 0 broadcasts before each forward; pass broadcast_buffers=False, and "
        "each rank keeps its own": broadcasts,
        "delay_all_reduce_named_params, whose all-reduce is torch's own; leave it out": delays,
        "sparse gradients; use Embedding(sparse=False)": any(p.sparse for p in engine.params),
    }
    if engine.group.size() > 1:
        found |= _unfit_group(engine)
    refused = [what for what, is_there in found.items() if is_there]
    if not refused and not is_gloo(engine.group):
        _over_nccl().add(engine)
    return refused


def _unfit_group(engine: Engine) -> dict[str, bool]:
    group = engine.group
    store = group_store(group)
    registered = store is not None
    found = {
        "a process group that torch.distributed did not make; use one of init_process_group() "
        "or new_group()": not registered,
        "a rendezvous store that is no TCP store, as with init_method='file://...': a rank that "
        "dies in a record of a file leaves the others waiting; use 'env://' or 'tcp://...'": (
            store is not None and served_at(store) is None
        ),
        "a process group whose CPU tensors Gloo does not carry; call init_process_group('gloo'), "
        "or with 'cpu:gloo,cuda:nccl'": registered and renewed_backend(group) is None,
        "ranks that do not look out for each other: leave FASTSYNC_WATCH unset, and see that "
        "they can reach each other": registered and watch_of(group) is None,
    }
    return found if is_gloo(group) or not registered else found | _unfit_nccl(engine)


@cache
def _over_nccl() -> weakref.WeakSet[Engine]:
    """Return the engines of this process that train over NCCL."""
    return weakref.WeakSet()


def _unfit_nccl(engine: Engine) -> dict[str, bool]:
    kills, bound = not Env.read().nccl_lets_live, default_group().bound_device_id is not None
    settings = " and ".join(f"{name}={value}" for name, value in NCCL_LETS_LIVE.items())
    return {
        f"NCCL while torch ends a process in which a collective fails: set {settings} before the "
        "process group is made, as `python -m fastsync.elastic` does": kills,
        "a process group of NCCL that is bound to a device, as torch makes others by splitting "
        "it; leave device_id out of init_process_group()": bound,
        "a second model over NCCL, whose communicator cannot be aborted while that of the other "
        "waits; use Gloo": any(other is not engine for other in _over_nccl()),
    }


def make_elastic(model: Front, engine: Engine, policy: ElasticPolicy) -> Elastic | None:
    """Make a complete model elastic; refuse what cannot be survived. None if it is alone.

    Raises:
        ValueError: on every rank alike.
    """
    delays = bool(model._delay_all_reduce_params) or model._delay_all_reduce_all_params
    broadcasts = bool(model.modules_buffers) and model.broadcast_buffers
    for what in _unfit(model.module, engine, delays, broadcasts):
        raise ValueError(f"elastic does not go with {what}")
    identity = RankIdentity.of(engine.group)
    began = 1 if identity is None else identity.started
    if began < policy.min_ranks:
        raise ValueError(
            f"elastic: min_ranks is {policy.min_ranks}, but only {began} ranks begin the training"
        )
    if identity is None:
        return None
    reducer = cast(DDPReducer, model.reducer)
    sharded, rounds = reducer.sharded, reducer.rounds
    elastic = Elastic(model, engine, policy, identity, sharded, rounds)
    if identity.returns:
        engine.on_step = _refuse
    me = weakref.proxy(elastic)  # the reducer must not keep its engine alive
    if sharded is not None:
        sharded.delivery.share_late = weakly(elastic.share_late)
        # Once the wrapper is gone, tasks run as without `elastic`.
        sharded.delivery.until_all = weakly(elastic.until_all, sharded.delivery.until_all)
    if rounds is not None:
        rounds.together = lambda *task: me.average(*task)
    engine.core.survive(
        lambda *found: me.meet(*found),
        lambda: me.rebuild(),
        elastic.timeout.total_seconds(),
    )
    engine.during = weakly(elastic.during, engine.during)
    return elastic
