"""Who is named where ranks end before they look out for each other."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from fastsync.engine import core
from fastsync.ranks.arrivals import Arrivals
from fastsync.ranks.faults import SyncFault
from fastsync.testing import RankError, run_ranks
from fastsync.torch_private import group_store

WORLD, FIRST, NAMED = 4, 1, 7


def end_in_turn(rank, world):
    """One rank ends, two more at its error, and the last one notices after that."""
    store = group_store(dist.group.WORLD)
    visit = Arrivals(store, ("turns", rank, world), 10.0, core.process_has_ended)
    store.add("came", 1)
    while store.add("came", 0) < world:
        time.sleep(0.01)
    if rank == FIRST:
        os._exit(3)
    if rank == world - 1:
        others = [f"gone {r}" for r in range(world) if r not in (rank, FIRST)]
        store.wait(others, timedelta(seconds=30))
        time.sleep(0.5)  # until they have ended
    with pytest.raises(SyncFault) as caught:
        visit.explain("Connection closed by peer")
    store.set(f"gone {rank}", "")
    os._exit(NAMED if caught.value.ranks == [FIRST] else 1)


def test_who_ends_because_of_another_is_not_named():
    with pytest.raises(RankError) as caught:
        run_ranks(end_in_turn, WORLD, grace=30)
    for rank, code in enumerate((NAMED, 3, NAMED, NAMED)):
        assert f"rank {rank} ended with exit code {code}" in str(caught.value)
