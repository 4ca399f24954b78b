"""A training that outlives its ranks: `FastDDP(model, elastic=True)`.

csrc/engine/reducer_elastic.cpp says when a step is committed and what each rank keeps until then;
fastsync/ranks/survivors.py how the survivors agree. One death, with four ranks:

1. Rank 2 is killed in its backward of step 7. Rank 0 and 1 wait there for its gradients, rank 3
   still computes. The fault watch tells all of them within a tenth of a second.
2. Ranks 0 and 1 meet in epoch 1. So does rank 3, when it has got to the end of its backward, or
   cannot send a bucket. None of them has all averages of step 7, so nobody can have used any.
3. They restore their own gradients of step 7, and make a group of their own, whose rank 0 tells the
   order of the buckets. Over that group they open a fault watch, share memory, plan, and tell each
   other through the store that they have: from then on the new watch tells of every death.
4. They average step 7 again, over three ranks. backward() returns.

Had rank 2 died later, in its vote, the survivors might all have had the averages of step 7. They
would have used those: rank 2 may have used them, too, and saved its weights.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn

from fastsync.engine.engine import Engine
from fastsync.engine.watch import watch_of
from fastsync.front.skipping import SkippingFront
from fastsync.plan.elastic import ElasticPolicy
from fastsync.ranks.faults import SyncFault
from fastsync.ranks.survivors import Decision, Standing, Survivors
from fastsync.torch_private import (
    group_store,
    group_timeout,
    is_gloo,
    keep_for_good,
    make_group,
    set_group_timeout,
)

if TYPE_CHECKING:
    from fastsync.engine.core import FaultWatch

__all__ = ["ElasticFront", "Membership"]

_log = logging.getLogger("fastsync")
_FAILS, _TAKES, _AGAIN = 0, 1, 2  # as csrc/engine/survival.h numbers verdicts
_CERTAINTY = 2.0  # seconds until a death that a backend's error tells of is known to the watch
_PATIENCE = timedelta(seconds=10)  # for each collective of those who rebuild
_PAUSE = 0.01


@dataclass(frozen=True)
class Membership:
    """The ranks that train, and since when.

    Attributes:
        rank: this one's place among them, from 0.
        ranks: those of the start that are left, as they were counted then.
        epoch: 0 at the start; each death makes a later one.
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
        """How many they are."""
        return len(self.ranks)


class _Elastic:
    """What one model does when ranks die."""

    def __init__(self, front: ElasticFront, engine: Engine, policy: ElasticPolicy) -> None:
        group = engine.group
        self._front, self._engine, self._policy = weakref.ref(front), engine, policy
        self._me, self._started = group.rank(), group.size()
        self._global = dist.get_process_group_ranks(group)
        self._timeout = group_timeout(group) or timedelta(minutes=30)
        identity = zlib.crc32("\n".join(p.name for p in engine.params).encode())
        store = group_store(group)
        assert store is not None
        self._store = store
        self._place = Survivors(store, f"elastic-{group.group_name}-{identity}", self._me)
        self._watches: list[tuple[FaultWatch, tuple[int, ...]]] = []
        self._decision: Decision | None = None
        self._epoch = 0
        self._obstacle: RuntimeError | None = None  # that the last attempt to rebuild has met
        self.now = Membership(self._me, tuple(range(self._started)), 0, 1, group)
        self._see(group, self.now.ranks)

    def meet(self, steps: int, complete: bool, error: str) -> int:
        """Called by the reducer when it waits in vain. Collective of those that are left.

        Returns:
            A verdict.

        Raises:
            SyncFault: the training cannot go on.
        """
        if not self._knows_of_death():
            return _FAILS
        return self._meet(Standing(steps, complete))

    def rebuild(self) -> None:
        """Called by the reducer between two steps. Collective of those that are left.

        Raises:
            SyncFault: the training cannot go on.
        """
        before = self.now
        while not self._is_rebuilt():
            if not self._knows_of_death():
                raise SyncFault(
                    f"fastsync: rank {self._me} could not connect with ranks "
                    f"{list(self._decided.ranks)} after others had died. Restart from a checkpoint"
                ) from self._obstacle
            self._meet(Standing(self._engine.core.steps(), False))
        self._say(before)

    def during(self, task: Callable[[], None]) -> None:
        """Runs what all ranks do together between two steps. After a death, rebuilding does it."""
        try:
            task()
        except RuntimeError as error:
            if self.meet(self._engine.core.steps(), False, str(error)) == _FAILS:
                raise
            self.rebuild()

    @property
    def _decided(self) -> Decision:
        assert self._decision is not None
        return self._decision

    def _see(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        watch = watch_of(group)
        if watch is not None:
            self._watches.append((watch, ranks))

    def _gone(self) -> dict[int, str]:
        """Who has ended so far, and how."""
        found: dict[int, str] = {}
        for watch, ranks in self._watches:
            for rank, words in watch.gone():
                found.setdefault(ranks[rank], words.removeprefix(f"rank {rank} "))
        found.pop(self._me, None)
        return found

    def _knows_of_death(self) -> bool:
        """Whether a rank has ended since the last decision."""
        present = self.now.ranks if self._decision is None else self._decision.ranks
        deadline = time.monotonic() + _CERTAINTY
        while time.monotonic() < deadline:
            if any(rank in present for rank in self._gone()):
                return True
            time.sleep(_PAUSE)
        return False

    def _meet(self, mine: Standing) -> int:
        before = self.now.ranks if self._decision is None else self._decision.ranks
        self._epoch += 1
        timeout = self._timeout.total_seconds()
        decision = self._place.meet(self._epoch, before, mine, self._gone, timeout)
        if self._me not in decision.ranks:
            raise SyncFault(
                f"fastsync: ranks {list(decision.ranks)} could not reach rank {self._me} and went "
                "on without it. Look at its network; it cannot come back to this training"
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
        gone = self._gone()
        lost = [rank for rank in before if rank not in left]
        return "; ".join(f"rank {rank} {gone.get(rank, 'has ended')}" for rank in lost)

    def _is_rebuilt(self) -> bool:
        """Whether the survivors average among themselves; not, where another has died meanwhile."""
        ranks = self._decided.ranks
        try:
            group = self._make_group(ranks)
            self._engine.use_group(group, agreed=False)
            self._see(group, ranks)
            set_group_timeout(group, self._timeout)
        except RuntimeError as error:
            self._obstacle = error
            return False
        if not self._place.gather(self._epoch, ranks, self._gone):
            return False
        self._use(group, ranks)
        return True

    def _make_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        keep_for_good(self._engine.group)
        members = [self._global[rank] for rank in ranks]
        name = f"{self._place.name}-{self._epoch}"
        return make_group(self._store, ranks.index(self._me), members, name, _PATIENCE)

    def _use(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        if self._policy.rescale == "sum_of_start":
            self._engine.core.set_divisor(float(self._started))
        since = self._engine.core.steps() + 1
        self.now = Membership(ranks.index(self._me), ranks, self._epoch, since, group)
        front = self._front()
        if front is not None:
            front.process_group = group

    def _say(self, before: Membership) -> None:
        if self.now.rank == 0:
            lost = self._losses(before.ranks, self.now.ranks)
            left = list(self.now.ranks)
            step = self.now.since
            _log.warning("fastsync: %s. Ranks %s go on with step %d", lost, left, step)


def _alive(elastic: weakref.ref[_Elastic]) -> _Elastic:
    """Whose front makes a step, or a plan."""
    found = elastic()
    assert found is not None
    return found


class ElasticFront(SkippingFront):
    """A front whose training may outlive ranks."""

    _elastic: _Elastic | None = None

    @property
    def elastic(self) -> Membership | None:
        """Who trains at present; None without `elastic=`."""
        return None if self._elastic is None else self._elastic.now

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = cast(Any, super()).__getstate__()
        state.pop("_elastic", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast(Any, super()).__setstate__(state)
        engine = cast(Any, self)._engine
        if engine.policy.elastic is not None:
            self._become_elastic(engine, engine.policy.elastic)

    def _become_elastic(self, engine: Engine, policy: ElasticPolicy) -> None:
        """Once all else is there. What cannot be survived is refused.

        Raises:
            ValueError: on every rank alike.
        """
        for what in self._unfit(engine):
            raise ValueError(f"elastic does not go with {what}")
        if engine.group.size() < policy.min_ranks:
            raise ValueError(
                f"elastic: min_ranks is {policy.min_ranks}, but only {engine.group.size()} ranks "
                "begin the training"
            )
        if engine.group.size() == 1:
            return
        elastic = self._elastic = _Elastic(self, engine, policy)
        me = weakref.ref(elastic)  # the reducer must not keep its engine alive
        engine.core.survive(lambda *found: _alive(me).meet(*found), lambda: _alive(me).rebuild())
        engine.during = lambda task: _alive(me).during(task)

    def _unfit(self, engine: Engine) -> list[str]:
        """What of model and ranks has no way back after a death, with the remedy."""
        module = cast(nn.Module, self.module)
        layers = [n for n, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
        delays = bool(self._delay_all_reduce_params) or self._delay_all_reduce_all_params
        found = {
            f"SyncBatchNorm, as layer {layers[:1]} is: its forward waits for all ranks; use "
            "BatchNorm": bool(layers),
            "buffers that rank 0 broadcasts before each forward; pass broadcast_buffers=False, and "
            "each rank keeps its own": bool(self.modules_buffers) and self.broadcast_buffers,
            "delay_all_reduce_named_params, whose all-reduce is torch's own; leave it out": delays,
            "sparse gradients; use Embedding(sparse=False)": any(p.sparse for p in engine.params),
        }
        if engine.group.size() > 1:
            found |= self._unfit_group(engine.group)
        return [what for what, is_there in found.items() if is_there]

    def _unfit_group(self, group: dist.ProcessGroup) -> dict[str, bool]:
        registered = group_store(group) is not None
        return {
            "a process group that torch.distributed did not make; use one of init_process_group() "
            "or new_group()": not registered,
            "a process group that is not Gloo's; call init_process_group('gloo')": registered
            and not is_gloo(group),
            "ranks that do not look out for each other: leave FASTSYNC_WATCH unset, and see that "
            "they can reach each other": registered and watch_of(group) is None,
        }
