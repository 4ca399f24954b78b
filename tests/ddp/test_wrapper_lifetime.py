"""Wrappers that come and go in one process: what they opened and started ends with them."""

import gc
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fastsync import FastDDP, Wire, Zero, fully_shard
from fastsync.testing import run_ranks
from tests.conformance.stages import batch, full, loss_of, net, sharded_by_layer
from tests.ddp.test_unusual_backwards import FailsHalfWay

KINDS = {
    "zero0": lambda m: FastDDP(m),
    "zero0-network": lambda m: FastDDP(m, wire=Wire(shared_memory=False)),
    "int8": lambda m: FastDDP(m, wire="int8"),
    "int8-network": lambda m: FastDDP(m, wire=Wire("int8", shared_memory=False)),
    "hook": lambda m: hooked(FastDDP(m, wire=Wire(shared_memory=False))),
    "zero1": lambda m: FastDDP(m, zero=1),
    "zero1-network": lambda m: FastDDP(m, zero=1, wire=Wire(shared_memory=False)),
    "zero2-network": lambda m: FastDDP(m, zero=2, wire=Wire(shared_memory=False)),
    "zero2-int8": lambda m: FastDDP(m, zero=Zero(2, parameter_wire="int8"), wire="int8"),
    "zero3": lambda m: FastDDP(m, zero=3),
    "zero3-network": lambda m: FastDDP(m, zero=3, wire=Wire(shared_memory=False)),
    "fully_shard": sharded_by_layer,
}


def hooked(model):
    model.register_comm_hook(None, allreduce_hook)
    return model


def held():
    """Return the descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def train(kind, rank, steps=3):
    model = KINDS[kind](net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()


def sweep(rank, world, kind):
    for _ in range(2):  # what the process keeps for all wrappers
        train(kind, rank)
    gc.collect()
    time.sleep(0.3)
    before = held()
    for _ in range(4):
        train(kind, rank)
    gc.collect()
    return settled(before)


def settled(before):
    """Return what is held now, once ends that are under way have come."""
    end = time.monotonic() + 5
    while held() > before and time.monotonic() < end:
        time.sleep(0.05)
    return before, held()


@pytest.mark.slow(but=("zero0", "zero3-network"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_holds_no_more_than_one_wrapper(kind):
    for before, after in run_ranks(sweep, 2, kind):
        assert after <= before, f"descriptors and threads: {before}, then {after}"


def trained_in_turns(rank, world, kind):
    """Ranks end their wrappers, and make the next ones, at different times."""
    found = []
    for turn in range(6):
        late = (turn + rank) % 2
        model = KINDS[kind](net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            loss = loss_of(model(batch(rank, step)))
            if late:
                time.sleep(0.02)
            loss.backward()
            optimizer.step()
        found.append(full(model))
        del model, optimizer, loss
        if late:
            time.sleep(0.02)
    return found


@pytest.mark.slow(but=("int8",))
@pytest.mark.parametrize("kind", ["int8", "int8-network", "zero2-network", "zero3-network"])
def test_ranks_end_wrappers_at_different_times(kind):
    first, second = run_ranks(trained_in_turns, 2, kind)
    for turn in [*first, *second]:
        assert all(torch.equal(value, first[0][name]) for name, value in turn.items())


def one_goes_early(rank, world, kind):
    """Rank 0 drops one of two wrappers while both ranks go on with the other one."""
    first, second = KINDS[kind](net()), KINDS[kind](net())
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    for step in range(5):
        if step == 2 and rank == 0:
            del first
            gc.collect()
        if step < 2:
            loss_of(first(batch(rank, step))).backward()
        optimizer.zero_grad()
        loss_of(second(batch(rank, step))).backward()
        optimizer.step()
    third = KINDS[kind](net())  # made beside groups that only one rank still has
    loss_of(third(batch(rank, 0))).backward()
    # Named by the number of groups that torch knows.
    ranks = dist.new_group(timeout=timedelta(seconds=20), use_local_synchronization=True)
    dist.barrier(ranks)
    return full(second)


@pytest.mark.slow(but=("zero3",))
@pytest.mark.parametrize("kind", ["int8", "int8-network", "zero1-network", "zero3"])
def test_a_wrapper_goes_on_one_rank_while_another_trains(kind):
    first, second = run_ranks(one_goes_early, 2, kind)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["head.weight"], net().head.weight)


def dropped_unfinished(rank, world):
    """Rank 0 has sent a bucket that rank 1 never sends when the wrapper goes."""
    model = FastDDP(FailsHalfWay(), wire=Wire("int8", shared_memory=False), bucket_cap_mb=1e-6)
    for _ in range(3):
        model(torch.ones(1, 4), False).backward()
    if rank == 0:
        with pytest.raises(ArithmeticError):
            model(torch.ones(1, 4), True).backward()
    began = time.monotonic()
    del model
    gc.collect()
    dist.barrier()
    return time.monotonic() - began


def test_a_wrapper_with_a_bucket_on_its_way_holds_up_nobody():
    """The group's own timeout is 30 minutes. `run_ranks` sees the processes end, too."""
    assert max(run_ranks(dropped_unfinished, 2)) < 30


def resharded_to_two(rank, world):
    before = held()
    for _ in range(5):
        model = fully_shard(net(), reshard_after_forward=2)
        loss_of(model(batch(rank, 0))).backward()
        del model
        gc.collect()
    return settled(before)


@pytest.mark.slow
def test_groups_of_units_that_are_resharded_to_fewer_ranks_end():
    """Each would have eight descriptors and three threads."""
    for (files, threads), (files_then, threads_then) in run_ranks(resharded_to_two, 4):
        assert files_then - files < 16 and threads_then - threads < 6
