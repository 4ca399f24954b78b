"""Which rank of a training this process is: as the launcher says, or the process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fastsync.build.env import Env
from fastsync.torch_private import PrefixStore, Store, group_store, root_store

__all__ = ["ELASTIC_STORE", "Seat"]

ELASTIC_STORE = "fastsync/elastic"  # what the launcher's store holds of the training


@dataclass(frozen=True)
class Seat:
    """One process of a training whose ranks may die and come back.

    Attributes:
        rank: as it was counted at the start.
        started: how many ranks began the training.
        members: by rank, what process groups call it here: its rank in the default group. In a
            process that came back that group has one rank, and the others have none.
        store: that all ranks reach under the same names.
        lasting: it is the launcher's, where ranks that come back find the others.
        returns: this process came back.
        process: another number on each process that `python -m fastsync.elastic` has started again.
    """

    rank: int
    started: int
    members: tuple[int, ...]
    store: Store
    lasting: bool
    returns: bool = False
    process: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Seat | None:
        """None where there is nobody to go on with: the training began with one rank."""
        env, store = Env.read(), group_store(group)
        if store is None:
            return None
        launched, lasting = env.elastic_rank, PrefixStore(ELASTIC_STORE, root_store(store))
        if launched is not None and env.restarts and group.size() == 1:
            rank, started = launched
            members = [0 if r == rank else r + 1 for r in range(started)]
            return cls(rank, started, tuple(members), lasting, True, True, env.restarts)
        if group.size() == 1:
            return None
        members = dist.get_process_group_ranks(group)
        whole = launched is not None and launched[1] == group.size()
        place = lasting if whole else store
        return cls(group.rank(), group.size(), tuple(members), place, whole)
