"""Calls that wrapping and steps of stage 3 take, which must grow as the number of parameters."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fastsync
from fastsync import FastDDP, fully_shard
from fastsync.testing import run_ranks

PACKAGE = str(Path(fastsync.__file__).parent)
COUNTS = (50, 200)  # of parameters


class Counter:
    """Counts calls of, and from, fastsync's functions while it is entered.

    torch's load_state_dict() looks through all names for each module.
    """

    def __enter__(self):
        self.calls = 0
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _count(self, frame, event, argument):
        ours = frame.f_code.co_filename.startswith(PACKAGE)
        self.calls += ours and event in ("call", "c_call")


class Many(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(params // 2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


WAYS = {"zero3": lambda model: FastDDP(model, zero=3), "fully_shard": fully_shard}


def calls(rank, world, way):
    """Return the calls of wrapping, of a step, and of loading: for few parameters and for many."""
    return [calls_for(way, params) for params in COUNTS]


def calls_for(way, params):
    module = Many(params)
    with Counter() as wrapping:
        model = WAYS[way](module)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with Counter() as step:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    state = model.state_dict()
    with Counter() as loading:
        model.load_state_dict(state)
    return wrapping.calls, step.calls, loading.calls


@pytest.mark.slow("fully_shard")
@pytest.mark.parametrize("way", WAYS)
def test_calls_grow_as_the_number_of_parameters(way):
    few, many = run_ranks(calls, 2, way)[0]
    for before, after in zip(few, many, strict=True):
        assert after <= 4.4 * before


def calls_of_one_storage(rank, world):
    """Return the calls of wrapping modules whose parameters were made views of one tensor."""
    return [calls_of_views(params) for params in COUNTS]


def calls_of_views(params):
    module = Many(params)
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(module.parameters()), module.parameters()
    )
    with Counter() as wrapping:
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    return wrapping.calls


def test_calls_grow_as_the_number_of_parameters_in_one_storage():
    few, many = run_ranks(calls_of_one_storage, 1)[0]
    assert many <= 4.4 * few
