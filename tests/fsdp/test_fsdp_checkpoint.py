"""State dicts of units: torch's functions and files, between ours, FSDP2, other ranks and none."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torchs

from fastsync import FastDDP, fully_shard
from tests.fsdp.fsdp_models import (
    OPTIMIZERS,
    apply,
    farthest,
    loss_of,
    net,
    train,
    train_alone,
    whole,
    words,
)
from tests.helpers.teams import run_ranks

WAYS = {
    "fsdp2": lambda: apply(torchs, net()),
    "ours": lambda: apply(fully_shard, net()),
    "zero3": lambda: FastDDP(net(), zero=3),
}


def made(way):
    model = WAYS[way]()
    return model, OPTIMIZERS["adamw"](model.parameters())


def save(rank, world, way, folder):
    model, optimizer = made(way)
    train(model, rank, optimizer, steps=2)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return train(model, 0, optimizer, steps=2)[0]


def load(rank, world, way, folder):
    model, optimizer = made(way)
    weights, states = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": states}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    return train(model, 0, optimizer, steps=2)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader", "worlds"),
    [
        ("ours", "ours", (2, 2)),
        ("ours", "fsdp2", (2, 2)),
        ("fsdp2", "ours", (2, 3)),
        ("ours", "ours", (3, 2)),
        ("zero3", "ours", (2, 1)),
        ("fsdp2", "zero3", (2, 2)),
    ],
)
def test_files_are_those_of_fsdp2(writer, reader, worlds):
    """Check that training goes on from a file with the weights and states of its writer."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = run_ranks(save, worlds[0], writer, folder)[0]
        for found in run_ranks(load, worlds[1], reader, folder):
            assert farthest(found, wanted) <= 1e-5


def saved(model, optimizer):
    """Return the state that any stage writes and reads."""
    return {"model": model.module.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}


def go_on(rank, world, stage, folder, reads):
    """Return weights after two steps that follow what was read, or that precede what is written."""
    model = FastDDP(net(), zero=stage)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if reads:
        state = saved(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        model.module.load_state_dict(state["model"])
        model.load_optimizer_state_dict(optimizer, state["optimizer"])
    else:
        train(model, rank, optimizer, steps=2)
        dcp.save(saved(model, optimizer), checkpoint_id=folder)
    return train(model, 0, optimizer, steps=2)[0]


@pytest.mark.slow(but=("3-2-worlds0", "0-3-worlds3"))
@pytest.mark.parametrize(
    ("writer", "reader", "worlds"),
    [
        (3, 2, (2, 3)),
        (3, 1, (3, 2)),
        (3, 0, (2, 1)),
        (0, 3, (1, 2)),
        (1, 3, (2, 3)),
        (2, 3, (3, 2)),
    ],
)
def test_stages_read_each_others_files(writer, reader, worlds, tmp_path):
    folder = str(tmp_path)
    wanted = run_ranks(go_on, worlds[0], writer, folder, False)[0]
    for found in run_ranks(go_on, worlds[1], reader, folder, True):
        assert farthest(found, wanted) <= 1e-5


def full(rank, world, way):
    model, optimizer = made(way)
    train(model, rank, optimizer, steps=2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    moments = {n: s["exp_avg"] for n, s in states["state"].items()} if states else {}
    other, _ = made(way)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(weights), options=broadcast)
    return weights, moments, whole(other.parameters()), whole(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ours", "zero3"])
def test_full_state_dicts(way):
    (weights, moments, loaded, trained), (empty, *_, others, _) = run_ranks(full, 2, way)
    wanted, theirs, *_ = run_ranks(full, 2, "fsdp2")[0]
    assert not empty
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in wanted.items()}
    assert farthest(weights.values(), wanted.values()) <= 1e-6
    assert farthest([moments[n] for n in theirs], theirs.values()) <= 1e-6
    assert farthest(loaded, trained) == farthest(others, trained) == 0


def between_steps(rank, world):
    """State dicts are taken and loaded in the midst of training, whole units or not."""
    model, optimizer = made("ours")
    train(model, rank, optimizer, steps=1)
    loss = loss_of(model, words(rank, 1))
    saved = {n: t.full_tensor().clone() for n, t in model.state_dict().items()}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = model.state_dict()
    for name, tensor in state.items():
        value = saved[name]
        state[name] = dist.tensor.distribute_tensor(value, tensor.device_mesh, tensor.placements)
    model.load_state_dict(state, assign=rank >= 0)
    found = whole(model.parameters())
    loss = loss_of(model, words(rank, 2)).item()
    plain = net()
    plain.load_state_dict(saved)
    return farthest(found, plain.parameters()), loss, loss_of(plain, words(rank, 2)).item()


def test_state_dicts_between_steps():
    for apart, loss, wanted in run_ranks(between_steps, 2):
        assert apart == 0
        assert loss == pytest.approx(wanted, rel=1e-5)


def converted(rank, world):
    """The module becomes of another dtype behind fully_shard()."""
    model = apply(fully_shard, net()).to(torch.float64)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    found = train(model, rank, optimizer)[0]
    assert all(p.dtype == torch.float64 for p in found)
    return found


@pytest.mark.slow
def test_a_module_that_is_converted_afterwards():
    wanted = train_alone(2, "sgd", model=net().double())
    for found in run_ranks(converted, 2):
        assert farthest(found, wanted) <= 1e-6
