"""A forward without gradients, or without its backward, on some ranks only: an error, or what every
rank may do.
"""

import os

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

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
        if deed is full and rank != who:
            full(model)  # only now, so that the other one comes back
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


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_one_rank_that_gathers_a_tensor_is_an_error_on_every_rank(stage):
    for raised, _ in run_ranks(apart, 2, stage, 1, full, timeout=40.0):
        assert "rank 1 gathers a whole tensor by full_tensor()" in raised, raised
        assert "full_state_dict=True" in raised


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_a_backward_that_a_rank_leaves_out_is_named_on_every_rank(stage):
    for raised, _ in run_ranks(apart, 2, stage, 1, forward, timeout=40.0):
        assert "rank 1 has left out a backward, or rank 0 has made one more" in raised, raised
        assert "as many backwards" in raised


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
