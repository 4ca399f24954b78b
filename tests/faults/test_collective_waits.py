"""Waits for collectives that Python has started name the late ranks, as other waits do."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from fastsync import FastDDP, fully_shard
from fastsync.testing import run_ranks
from tests.fsdp.fsdp_models import mesh_of
from tests.fsdp.test_fsdp_extensions import Coded, wrapped

SLEEPER, SLEEPS = 1, 2.0


class Fixed(nn.Module):
    """A table of integers, which a rank looks up after its sleep."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(8, dtype=torch.int32), requires_grad=False)

    def forward(self, x):
        return x * self.table


def sleep(rank):
    if rank == SLEEPER:
        time.sleep(SLEEPS)


def replicated(rank, world):
    model = fully_shard(nn.Linear(8, 8), mesh=mesh_of(world, world))
    model(torch.ones(2, 8)).sum().backward()
    loss = model(torch.ones(2, 8)).sum()
    sleep(rank)
    loss.backward()


def kept(rank, world):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    loss = model(torch.ones(2, 8)).sum()
    sleep(rank)
    loss.backward()


def integers(rank, world):
    model = fully_shard(Fixed())
    model(torch.ones(2, 8))
    model.reshard()
    sleep(rank)
    model(torch.ones(2, 8))


def extended(rank, world):
    model = fully_shard(wrapped(nn.Linear(8, 52, bias=False), Coded))
    model(torch.ones(2, 8)).sum().backward()
    sleep(rank)
    model(torch.ones(2, 8))


def buffered(rank, world):
    model = FastDDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    model(torch.ones(2, 8)).sum().backward()
    sleep(rank)
    model(torch.ones(2, 8)).sum().backward()


def joined(rank, world):
    model = FastDDP(nn.Linear(8, 8))
    with Join([model]):
        model(torch.ones(2, 8)).sum().backward()
        sleep(rank)
        model(torch.ones(2, 8)).sum().backward()


def said(rank, world, train, path):
    """Return what rank 0 has printed."""
    os.environ["FASTSYNC_STALL_WARN"] = "0.3"
    with open(path, "w") as file:
        if rank == 0:
            os.dup2(file.fileno(), 2)
        train(rank, world)
        dist.barrier()
    return Path(path).read_text() if rank == 0 else ""


PLACES = [
    (replicated, 2, "the sum over replicas of unit", True),
    (kept, 4, "the gather of unit", True),
    (integers, 2, "the gather of unit", True),
    (extended, 2, "the gather of what fsdp_pre_all_gather() gives", False),
    (buffered, 2, "the broadcast of rank 0's buffers", True),
    (joined, 2, "the count of ranks in join()", False),
]


@pytest.mark.slow(but=("kept",))
@pytest.mark.parametrize(
    ("train", "world", "place", "names"), PLACES, ids=[train.__name__ for train, *_ in PLACES]
)
def test_who_waits_says_where_and_for_whom(train, world, place, names, tmp_path):
    text = run_ranks(said, world, train, str(tmp_path / "said"))[0]
    assert f"s in {place}" in text, text
    assert (f"fastsync:   rank {SLEEPER} is late" in text) == names, text
    assert "no rank says that it is late" not in text, "one is"
