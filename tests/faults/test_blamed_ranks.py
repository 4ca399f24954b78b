"""Ranks that a rank blames while it waits for others at a place in Python."""

import os
import tempfile
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync._torch import group_store
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer import monitor
from tests.helpers.teams import run_ranks

SLEEPER, ERROR, SOON = 1, "timed out after 3 s", timedelta(seconds=30)


def blamed(scope):
    with pytest.raises(SyncFault) as caught:
        scope.explain(ERROR)
    scope.end(False)
    return caught.value.ranks


def gives_up_in_turn(rank, world):
    """One rank does not come. One waits for it in vain, and one is through and waits elsewhere."""
    group = dist.group.WORLD
    store = group_store(group)
    model = fastsync.FastDDP(nn.Linear(2, 2))
    if rank == SLEEPER:
        store.wait(["second"], SOON)
        return None
    scope = monitor._wait_scope(group, "the first place")
    if rank == 0:
        store.wait(["through"], SOON)
        ranks = blamed(scope)
        store.set("first", "")
        store.wait(["second"], SOON)
        return ranks
    scope.end(True)
    scope = monitor._wait_scope(group, "the second place")
    store.set("through", "")
    store.wait(["first"], SOON)
    ranks = blamed(scope)
    store.set("second", "")
    del model
    return ranks


def test_who_has_given_up_is_not_taken_for_the_one_that_is_late():
    assert run_ranks(gives_up_in_turn, 3) == [[SLEEPER], None, [SLEEPER]]


def warns_of(rank, world):
    """Return what rank 0 prints that waits for the sleeper alone, once it has warned."""
    os.environ["FASTSYNC_STALL_WARN"] = "0.2"
    group = dist.group.WORLD
    store = group_store(group)
    model = fastsync.FastDDP(nn.Linear(2, 2))
    if rank == SLEEPER:
        store.wait(["warned"], SOON)
        return None
    scope = monitor.watch_of(group).wait_scope("together", "a place", [SLEEPER])
    with tempfile.TemporaryFile() as printed:
        stderr = os.dup(2)
        os.dup2(printed.fileno(), 2)
        while os.fstat(printed.fileno()).st_size == 0:
            scope.look()
            time.sleep(0.05)
        os.dup2(stderr, 2)
        printed.seek(0)
        text = printed.read().decode()
    scope.end(False)
    store.set("warned", "")
    del model
    return text


def test_a_rank_that_waits_for_late_ranks_alone_warns_of_them():
    text, _ = run_ranks(warns_of, 2)
    assert text.startswith("fastsync: rank 0 has waited "), text
    assert f"fastsync:   rank {SLEEPER} is late" in text, text
