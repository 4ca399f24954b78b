"""A forward without gradients, without its backward, or of other layers on some ranks only: an
error, or what every rank may do.
"""

import os

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fastsync
from tests.conformance.stages import (
    SHARDED_PARAMETERS,
    STAGES,
    batch,
    check,
    full,
    loss_of,
    net,
    train,
)
from tests.helpers.teams import run_ranks


def evaluate(model):
    with torch.no_grad():
        return model(batch(9, 99))


def apart(rank, world, stage, who, deed):
    """Return the error of this rank, where rank `who` does something alone; is all as before?"""
    os.environ["FASTSYNC_STALL_WARN"] = "0.5"
    model = STAGES[stage](net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    try:
        if rank == who:
            deed(model)
        train(model, optimizer, rank, range(3 if deed is forward and rank == who else 2, 5))
    except Exception as error:
        if deed in (full, read) and rank != who:
            deed(model)  # only now, so that the other one comes back
        kept = {n: torch.equal(before[n], p.to_local()) for n, p in model.named_parameters()}
        return f"{type(error).__name__}: {error}", all(kept.values())
    return "", False


def forward(model):
    """Leave out a backward."""
    loss_of(model(batch(0, 2)))


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
@pytest.mark.parametrize(("who", "world"), [(0, 2), (1, 2), (0, 3)])
def test_one_rank_that_evaluates_is_an_error_on_every_rank(who, world, stage):
    for raised, unchanged in run_ranks(apart, world, stage, who, evaluate, timeout=40.0):
        assert f"rank {who} evaluates while rank" in raised, raised
        assert "have every rank evaluate" in raised
        assert "full_state_dict=True" in raised
        assert unchanged


def read(model):
    return sum(float(param.detach().sum()) for param in model.parameters())


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
@pytest.mark.parametrize("deed", [full, read])
def test_one_rank_that_gathers_a_tensor_is_an_error_on_every_rank(deed, stage):
    for raised, _ in run_ranks(apart, 2, stage, 1, deed, timeout=40.0):
        assert "rank 1 gathers a whole tensor (full_tensor(), item() or float())" in raised, raised
        assert "full_state_dict=True" in raised


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_a_backward_that_a_rank_leaves_out_is_named_on_every_rank(stage):
    for raised, _ in run_ranks(apart, 2, stage, 1, forward, timeout=40.0):
        assert "rank 1 has left out a backward, or rank 0 has made one more" in raised, raised
        assert "as many backwards" in raised


class Branches(nn.Module):
    """A model of which each forward runs one of two layers."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x, left):
        return self.head(torch.tanh((self.left if left else self.right)(x)))


def ranks_run_other_layers(rank, world, chosen_together, first=1):
    """Train with a layer that every second step chooses by rank. Return the error, or weights.

    Args:
        first: the first such step.
    """
    os.environ["FASTSYNC_STALL_WARN"] = "0.5"
    model = net(Branches)
    for layers in [[model.left, model.right]] if chosen_together else model.children():
        fastsync.fully_shard(layers)
    fastsync.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    before = {}
    try:
        for step in range(4):
            before = {name: param.to_local().clone() for name, param in model.named_parameters()}
            optimizer.zero_grad()
            loss_of(model(batch(rank, step), left=step % 2 != first or rank == 0)).backward()
            optimizer.step()
    except Exception as error:
        kept = {n: torch.equal(before[n], p.to_local()) for n, p in model.named_parameters()}
        return f"{type(error).__name__}: {error}", all(kept.values()) and step == first
    return full(model)


@pytest.mark.parametrize(("world", "first"), [(2, 1), (3, 1), (2, 0)])
def test_ranks_that_run_other_layers_are_an_error_on_every_rank(world, first):
    """In the first step of all no order is known yet."""
    for raised, unchanged in run_ranks(ranks_run_other_layers, world, False, first, timeout=40.0):
        assert "run different modules, or in another order" in raised, raised
        assert "unit 'left'" in raised or "unit 'right'" in raised
        assert "fully_shard([a, b])" in raised
        assert unchanged


def test_the_remedy_for_ranks_that_run_other_layers():
    mine, other = run_ranks(ranks_run_other_layers, 2, True, timeout=40.0)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def every_rank_evaluates(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    output = evaluate(model)
    train(model, optimizer, rank, range(2, 4))
    return {"output": output, **full(model)}


def one_evaluates_a_whole_copy(wrap, rank):
    """Follow the second remedy."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    output = torch.zeros(4, 3)
    if rank == 0:
        copy = net()
        copy.load_state_dict(weights)
        output = evaluate(copy)
    train(model, optimizer, rank, range(2, 4))
    return {"output": output, **full(model)}


def one_saves_its_share(wrap, rank):
    """state_dict() is each rank's own, and gathers nothing."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(2))
    if rank == 0:
        model.state_dict()
    train(model, optimizer, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "script", [every_rank_evaluates, one_evaluates_a_whole_copy, one_saves_its_share]
)
def test_what_ranks_may_do(script, stage):
    check(script, stage)


def a_frozen_model(rank, world):
    """Nothing is trained, so ranks may differ in whether they record gradients."""
    model = STAGES["fully_shard"](net().requires_grad_(False))
    outputs = []
    for step in range(4):
        with torch.set_grad_enabled((rank + step) % 2 == 0):
            outputs.append(model(batch(0, step)))
    return outputs


def test_ranks_may_differ_where_nothing_is_trained():
    first, second = run_ranks(a_frozen_model, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
