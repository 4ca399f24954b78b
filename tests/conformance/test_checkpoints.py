"""Checkpoints: what a script saves, copies and loads, at each stage."""

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

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


def made(wrap, seed=0):
    model = wrap(net(seed=seed))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


# --- copies of a state dict


def by_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def to_the_cpu(state):
    """Copy tensors as many scripts do, each by itself."""
    moved = {name: value.cpu().clone() for name, value in state["model"].items()}
    return {"model": moved, "optimizer": copy.deepcopy(state["optimizer"])}


COPIES = {"torch.save": by_file, "deepcopy": copy.deepcopy, "cpu": to_the_cpu}


def goes_back(wrap, rank, copied):
    """Train, copy the state, train on, go back, and train again."""
    model, optimizer = made(wrap)
    train(model, optimizer, rank, range(2))
    state = COPIES[copied]({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, rank, range(10, 12))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("copied", COPIES)
def test_goes_back_to_a_copied_state(copied, stage):
    check(goes_back, stage, copied)


def copies_gradients(wrap, rank, copied):
    """Replace gradients by copies of them before the step."""
    model, optimizer = made(wrap)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        state = COPIES[copied]({"model": grads, "optimizer": {}})["model"]
        for name, param in model.named_parameters():
            param.grad = state[name]
        optimizer.step()
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("copied", COPIES)
def test_copies_gradients(copied, stage):
    check(copies_gradients, stage, copied)


# --- torch.distributed.checkpoint


def goes_back_by_dcp(wrap, rank, way):
    """Go back as `goes_back` does, with the functions of torch.distributed.checkpoint."""
    model, optimizer = made(wrap)
    train(model, optimizer, rank, range(2))
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optim_state}
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    if way == "async":
        dcp.async_save(state, checkpoint_id=shared[0]).result()
    else:
        dcp.save(state, checkpoint_id=shared[0])
    train(model, optimizer, rank, range(10, 12))
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optim_state}
    dcp.load(state, checkpoint_id=shared[0])
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(model, optimizer, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["save", "async"])
def test_goes_back_by_dcp(way, stage):
    check(goes_back_by_dcp, stage, way)


def goes_back_to_a_full_state(wrap, rank):
    """Keep whole tensors on every rank, through a file."""
    model, optimizer = made(wrap)
    train(model, optimizer, rank, range(2))
    options = StateDictOptions(full_state_dict=True)
    states = by_file(get_state_dict(model, optimizer, options=options))
    train(model, optimizer, rank, range(10, 12))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states[0],
        optim_state_dict=states[1],
        options=options,
    )
    train(model, optimizer, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(but=("zero1-small", "zero3", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_goes_back_to_a_full_state(stage):
    check(goes_back_to_a_full_state, stage)


# --- whole states, and those of other numbers of ranks

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01, centered=True, momentum=0.5),
}


def unsharded_state(optimizer, rank):
    """Return the state dicts of a model that trains without any wrapper."""
    model = net()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    train(model, optimizer, 0, range(2))
    return by_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def goes_on_from_an_unsharded_state(wrap, rank, optimizer, assign=False, steps=()):
    """Load it, perhaps in the middle of a training, where the optimizer has a state already."""
    state = unsharded_state(optimizer, rank)
    model = wrap(net(seed=1))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    train(model, stepper, rank, steps)
    inner = getattr(model, "module", model)
    # Under DDP an assigned parameter would be one that it does not know.
    assign = assign and hasattr(next(model.parameters()), "full_tensor")
    inner.load_state_dict(state["model"], assign=assign)
    if assign:
        stepper = OPTIMIZERS[optimizer](model.parameters())
    stepper.load_state_dict(state["optimizer"])
    train(model, stepper, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_goes_on_from_an_unsharded_state(optimizer, stage):
    check(goes_on_from_an_unsharded_state, stage, optimizer)


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_assigns_an_unsharded_state(stage):
    check(goes_on_from_an_unsharded_state, stage, "adamw", True)


@pytest.mark.slow(but=("zero1-small", "zero3", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_goes_back_to_an_unsharded_state(stage):
    check(goes_on_from_an_unsharded_state, stage, "adamw", False, range(2))


def saves_own_state(rank, world, stage):
    model, optimizer = made(STAGES[stage])
    train(model, optimizer, rank, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


def loads_own_state(rank, world, stage, saved):
    model, optimizer = made(STAGES[stage])
    try:
        optimizer.load_state_dict(torch.load(io.BytesIO(saved[rank]), weights_only=False))
        train(model, optimizer, rank, range(2, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_a_rank_s_own_state_of_another_number_of_ranks_is_an_error(stage):
    saved = run_ranks(saves_own_state, 3, stage)
    for raised in run_ranks(loads_own_state, 2, stage, saved):
        assert raised is not None
        assert "torch.distributed.checkpoint" in raised, raised


# --- storages, as safetensors and save_pretrained() look at them


def storages(rank, world, stage):
    """Return, for each tensor, its storage's address and bytes, and the bytes it needs."""
    model, optimizer = made(STAGES[stage])
    train(model, optimizer, rank, range(1))
    found = []
    for tensor in [*model.state_dict().values(), *(p.grad for p in model.parameters())]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        found.append((local.storage_offset(), storage.data_ptr(), storage.nbytes(), local.nbytes))
    return found


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_each_tensor_has_a_storage_of_its_own(stage):
    for found in run_ranks(storages, 2, stage):
        assert all(offset == 0 and held == needed for offset, _, held, needed in found)
        addresses = [address for _, address, held, _ in found if held]
        assert len(set(addresses)) == len(addresses)
