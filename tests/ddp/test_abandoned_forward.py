"""A forward outside no_sync() whose backward never comes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.helpers.teams import run_ranks


def accumulate_after_an_abandoned_forward(rank, world, wrapper):
    torch.manual_seed(0)
    model = wrapper(torch.nn.Linear(2, 1, bias=False))
    inputs = torch.full((1, 2), float(rank + 1))
    model(inputs)
    with model.no_sync():
        model(inputs).sum().backward()
    return model.module.weight.grad[0, 0].item()


@pytest.mark.slow("ddp")
@pytest.mark.parametrize(
    "wrapper, gradients",
    [(DistributedDataParallel, [1.5, 1.5]), (fastsync.FastDDP, [1.0, 2.0])],
    ids=["ddp", "fastsync"],
)
def test_no_sync_after_it_only_accumulates(wrapper, gradients):
    """DDP's reducer still waits for that backward, and takes the next one for it."""
    assert run_ranks(accumulate_after_an_abandoned_forward, 2, wrapper) == gradients
