"""Ranks that are named where ranks end before the fault watch is open."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import fastsync
from fastsync._torch import group_store
from fastsync.faults.barrier import Arrivals
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer import core, monitor, process_groups
from fastsync.testing import RankError, run_ranks

WORLD, FIRST, NAMED = 4, 1, 7
TIMEOUT = timedelta(seconds=3)


def end_in_turn(rank, world):
    """One rank ends, two more at its error, and the last one notices after that."""
    store = group_store(dist.group.WORLD)
    scope = Arrivals(store, ("turns", rank, world), 10.0, core.process_has_ended, False)
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
        scope.explain("Connection closed by peer")
    store.set(f"gone {rank}", "")
    os._exit(NAMED if caught.value.ranks == [FIRST] else 1)


def test_who_ends_because_of_another_is_not_named():
    with pytest.raises(RankError) as caught:
        run_ranks(end_in_turn, WORLD, grace=30)
    for rank, code in enumerate((NAMED, 3, NAMED, NAMED)):
        assert f"rank {rank} ended with exit code {code}" in str(caught.value)


def stops_itself(rank, store):
    """When all have come to their first meeting, and before it says anything there."""
    if rank == FIRST:
        monitor._gather = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped(rank, store):
    """While it makes a process group, and has told the others where it listens."""
    make = process_groups.make_beside

    def others(*args, **options):
        if rank == 0:
            time.sleep(0.5)  # until it waits for the others
            os.kill(int(store.get("process")), signal.SIGSTOP)
            store.set("stopped", "")
        store.wait(["stopped"])
        return make(*args, **options)

    if rank != FIRST:
        process_groups.make_beside = others


def meet(rank, world, prepare):
    store = group_store(dist.group.WORLD)
    _set_pg_timeout(TIMEOUT, dist.group.WORLD)
    if rank == FIRST:
        store.set("process", str(os.getpid()))
    prepare(rank, store)
    model = fastsync.fully_shard(nn.Linear(2, 2))
    with pytest.raises(SyncFault) as caught:
        model(torch.ones(1, 2))
    told = store.add("told", 1)
    while rank == 0 and told < world - 1:
        time.sleep(0.01)
        told = store.add("told", 0)
    if rank == 0:
        os.kill(int(store.get("process")), signal.SIGKILL)
    soon = caught.value.seconds < 5 * TIMEOUT.total_seconds()  # as long as torch waits
    os._exit(NAMED if caught.value.ranks == [FIRST] and soon else 1)


@pytest.mark.slow("is_stopped")
@pytest.mark.parametrize("prepare", [stops_itself, is_stopped])
def test_who_stops_once_it_has_come_is_named(prepare):
    with pytest.raises(RankError) as caught:
        run_ranks(meet, 3, prepare, grace=60)
    for rank in (0, 2):
        assert f"rank {rank} ended with exit code {NAMED}" in str(caught.value)
