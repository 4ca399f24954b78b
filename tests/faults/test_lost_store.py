"""A rank that loses its connection to the rendezvous store, while all others keep theirs."""

import contextlib
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP
from fastsync._torch import PrefixStore, TCPStore, default_group, group_store
from fastsync.faults.stores import served_at
from fastsync.testing import run_ranks

LOST = 1


def connections(place):
    """This process's file descriptors of connections with the store."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.family != socket.AF_UNIX and each.getpeername()[1] == place[1]:
                found.add(int(name))
    return found


def with_store(rank, world, work):
    """Do `work` in a group whose store has a connection of its own: by the first one ranks leave.

    `work` is given what cuts it.
    """
    place = served_at(group_store(default_group()))
    dist.barrier()  # a rank that leaves the first group would end others' connecting to it
    dist.destroy_process_group()
    before = connections(place)
    store = PrefixStore("cut", TCPStore(*place, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def cut():
        for file in connections(place) - before:
            with socket.socket(fileno=os.dup(file)) as found:
                found.shutdown(socket.SHUT_RDWR)

    return work(rank, cut)


def tell(error):
    """Report an error as where the script ends by it."""
    sys.excepthook(type(error), error, error.__traceback__)


def step(model):
    model(torch.ones(1, 2)).sum().backward()


def wraps(rank, cut):
    if rank == LOST:
        cut()
    with pytest.raises(RuntimeError) as caught:
        FastDDP(nn.Linear(2, 2))
    return str(caught.value)


def trains(rank, cut):
    model = FastDDP(nn.Linear(2, 2))
    for number in range(4):
        if rank == LOST and number == 2:
            cut()
        step(model)
    return model.module.weight.grad.sum().item()


def thaws(rank, cut):
    model = FastDDP(nn.Linear(2, 2))
    model.module.bias.requires_grad_(False)
    step(model)
    step(model)
    if rank == LOST:
        cut()
    model.module.bias.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        step(model)
    tell(caught.value)
    return str(caught.value)


def test_training_goes_on():
    assert len(set(run_ranks(with_store, 3, trains))) == 1


@pytest.mark.slow("thaws")
@pytest.mark.parametrize("work", [wraps, thaws])
def test_every_rank_names_the_one_that_has_lost_the_store(work):
    texts = run_ranks(with_store, 3, work)
    for rank, text in enumerate(texts):
        assert f"rank {LOST} cannot reach the rendezvous store at 127.0.0.1:" in text, (rank, text)
        assert "only the one of this rank has been lost" in text, (rank, text)
        assert "has not begun to wrap" not in text, (rank, text)
