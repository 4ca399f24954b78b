"""Ranks that a rank blames while it waits for others at a place in Python."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.engine import watch
from fastsync.ranks.faults import SyncFault
from fastsync.torch_private import group_store
from tests.teams import run_ranks

SLEEPER, ERROR, SOON = 1, "timed out after 3 s", timedelta(seconds=30)


def blamed(visit):
    with pytest.raises(SyncFault) as caught:
        visit.explain(ERROR)
    visit.end(False)
    return caught.value.ranks


def gives_up_in_turn(rank, world):
    """One rank does not come. One waits for it in vain, and one is through and waits elsewhere."""
    group = dist.group.WORLD
    store = group_store(group)
    model = fastsync.FastDDP(nn.Linear(2, 2))
    if rank == SLEEPER:
        store.wait(["second"], SOON)
        return None
    visit = watch._visit(group, "the first place")
    if rank == 0:
        store.wait(["through"], SOON)
        ranks = blamed(visit)
        store.set("first", "")
        store.wait(["second"], SOON)
        return ranks
    visit.end(True)
    visit = watch._visit(group, "the second place")
    store.set("through", "")
    store.wait(["first"], SOON)
    ranks = blamed(visit)
    store.set("second", "")
    del model
    return ranks


def test_who_has_given_up_is_not_taken_for_the_one_that_is_late():
    assert run_ranks(gives_up_in_turn, 3) == [[SLEEPER], None, [SLEEPER]]
