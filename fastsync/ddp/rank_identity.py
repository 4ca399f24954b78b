"""The rank of a training that this process is: as the launcher says, or the process group.

A process that the launcher starts while others train makes a default group of its own, in a store
of its own. In the others' store it would be a second rank 0, under the keys of the first one, which
ranks that begin at that moment would connect with instead. Its variables RANK and WORLD_SIZE are
those of the training, since scripts choose seeds and files by them; only the rendezvous of the
default group ignores them.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import (
    PrefixStore,
    Store,
    connect_store,
    group_store,
    group_timeout,
    meet_alone,
    root_store,
)
from fastsync.faults.stores import limit_silence

_PR_SET_PDEATHSIG = 1  # of Linux's prctl()
ELASTIC_STORE = "fastsync/elastic"  # what the launcher's store holds of the training


@dataclass(frozen=True)
class RankIdentity:
    """One process of a training whose ranks may die and come back, and which others may join.

    Attributes:
        rank: as it was counted at the start, or the next number, where it has joined since.
        started: how many ranks began the training.
        members: ranks of the start in the default group; none in a process that was started later.
        store: that all ranks reach under the same names.
        lasting: it is the launcher's, where ranks that come back find the others.
        returns: this process was started later: it comes back or joins.
        process: another number on each of those that `python -m fastsync.elastic` has started.
    """

    rank: int
    started: int
    members: tuple[int, ...]
    store: Store
    lasting: bool
    returns: bool = False
    process: int = 0

    def member(self, rank: int) -> int:
        """Return a rank's number in the process groups of this process: its rank in the default
        group.

        In a process that was started later, that group has one rank; the other ranks get numbers
        beyond it.
        """
        if self.returns:
            return 0 if rank == self.rank else rank + 1
        return self.members[rank] if rank < self.started else rank

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankIdentity | None:
        """Return this process's rank; None if the training began with one rank, which cannot
        survive.
        """
        env, store = Env.read(), group_store(group)
        if store is None:
            return None
        launched = env.elastic_rank
        if launched is not None:
            _end_with_parent()
        if group.size() == 1:
            if launched is None or env.elastic_store is None:
                return None
            timeout = group_timeout(group) or timedelta(minutes=30)
            theirs = PrefixStore(ELASTIC_STORE, connect_store(*env.elastic_store, timeout))
            limit_silence(theirs, env.lost_after)
            return cls(*launched, (), theirs, True, True, env.restarts)
        members = dist.get_process_group_ranks(group)
        whole = launched is not None and launched[1] == group.size()
        place = PrefixStore(ELASTIC_STORE, root_store(store)) if whole else store
        return cls(group.rank(), group.size(), tuple(members), place, whole)


def meet_alone_where_started_later() -> None:
    """Give this process a default group of one rank, if it comes back or joins."""
    env = Env.read()
    # A launcher within the script, such as torchrun, counts the starts of its own ranks from 0.
    if env.elastic_store is not None and env.restarts:
        meet_alone(env.master_port)


def _end_with_parent() -> None:
    """Let the system send this process a SIGTERM once its parent has ended.

    Only Linux does. Where a shell stands between the launcher and this process, that is the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
