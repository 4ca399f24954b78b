"""Optimizers step on shares as on DTensors, bit for bit. A class derived from one of torch's is not
known, and steps on DTensors: it is what the others are compared with."""

import pytest
import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastsync import FastDDP, fully_shard
from fastsync._torch import local_of
from tests.fsdp.fsdp_models import apply, loss_of, mesh_of, net, words
from tests.helpers.teams import run_ranks

STEPS = 4
SETTINGS = {
    "ASGD": {"lr": 0.01},
    "Adadelta": {},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "AdamW, foreach": {"lr": 0.01, "foreach": True},
    "AdamW, fused": {"lr": 0.01, "fused": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.1},
    "SGD, momentum": {"lr": 0.1, "momentum": 0.9, "maximize": True},
}


def class_of(name, derived):
    own = getattr(optim, name.partition(",")[0])
    return type("Derived", (own,), {}) if derived else own


def bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    shown = [type(value).__name__, str(value.dtype), tuple(value.shape)]
    if isinstance(value, DTensor):
        shown.append(value.placements)
        value = local_of(value)
    return (*shown, value.detach().contiguous().view(-1).view(torch.uint8).tolist())


def held(model, optimizer):
    """Everything that a step changes; state under its parameter's number."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    number = {id(param): i for i, param in enumerate(params)}
    state = {
        number[id(p)]: {k: bits(v) for k, v in kept.items()} for p, kept in optimizer.state.items()
    }
    return [bits(param) for param in model.parameters()], state


def sharded(rows, world):
    return apply(fully_shard, net(), mesh=mesh_of(world, rows))


def train(rank, world, name, derived, rows=None):
    model = sharded(rows, world)
    optimizer = class_of(name, derived)(model.parameters(), **SETTINGS[name])
    for step in range(STEPS):
        loss_of(model, words(rank, step)).backward()
        if step == 1:
            model.blocks[1].up.weight.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return held(model, optimizer)


@pytest.mark.slow(
    but=(
        "AdamW",
        "SGD, momentum",
    )
)
@pytest.mark.parametrize("name", SETTINGS)
def test_bits_are_those_of_steps_on_dtensors(name):
    assert run_ranks(train, 3, name, False) == run_ranks(train, 3, name, True)


@pytest.mark.slow
def test_bits_with_replicas_of_shares():
    assert run_ranks(train, 4, "AdamW", False, 2) == run_ranks(train, 4, "AdamW", True, 2)


def rprop(rank, world):
    """Rprop does not step on DTensors; here its twin steps on copies of the shares."""
    model = sharded(None, world)
    copies = [local_of(param).detach().clone() for param in model.parameters()]
    optimizer, twin = optim.Rprop(model.parameters()), optim.Rprop(copies)
    for step in range(STEPS):
        loss_of(model, words(rank, step)).backward()
        for param, copy in zip(model.parameters(), copies, strict=True):
            copy.grad = local_of(param.grad).clone()
        optimizer.step()
        twin.step()
        optimizer.zero_grad()
    return all(
        torch.equal(local_of(param), copy)
        for param, copy in zip(model.parameters(), copies, strict=True)
    )


def test_rprop_steps_too():
    assert run_ranks(rprop, 3) == [True] * 3


class Counted(TorchDispatchMode):
    """How many operations see a DTensor."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def count(rank, world, derived):
    model = FastDDP(net(), zero=3)
    optimizer = class_of("AdamW", derived)(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    counts = []
    for step in range(2):
        loss_of(model, words(rank, step)).backward()
        with Counted() as counted:
            optimizer.step()
        counts.append(counted.found)
    return counts


def test_no_operation_sees_a_dtensor():
    assert run_ranks(count, 2, False) == [[0, 0]] * 2
    assert all(min(counts) > 0 for counts in run_ranks(count, 2, True))


def two_models(rank, world, derived):
    """One optimizer of two models, with a parameter that belongs to neither."""
    first, second = FastDDP(net(), zero=3), FastDDP(net(blocks=1), zero=3)
    lone = torch.nn.Parameter(torch.ones(3))
    optimizer = class_of("Adam", derived)([*first.parameters(), *second.parameters(), lone])
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(first, words(rank, step)) + loss_of(second, words(rank, step))).backward()
        lone.grad = torch.full((3,), 0.5)
        optimizer.step()
    weights, state = held(torch.nn.ModuleList([first, second]), optimizer)
    assert len(state) == sum(1 for group in optimizer.param_groups for _ in group["params"])
    return weights, state, bits(lone)


def by_closure(rank, world, derived):
    model = FastDDP(net(), zero=3)
    optimizer = class_of("SGD", derived)(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, words(rank, step))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, held(model, optimizer)


def moved(rank, world, derived):
    """State goes from one optimizer to another by its state_dict, in the middle."""
    model = FastDDP(net(), zero=3)
    make = class_of("AdamW", derived)
    optimizer = make(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, words(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept, optimizer = optimizer.state_dict(), make(model.parameters(), lr=0.5)
        optimizer.load_state_dict(kept)
    return held(model, optimizer)


@pytest.mark.parametrize("script", [two_models, by_closure, moved])
def test_scripts_have_the_bits_of_steps_on_dtensors(script):
    assert run_ranks(script, 2, False) == run_ranks(script, 2, True)


def failing(rank, world):
    """A step that raises leaves the optimizer as it is."""
    model = FastDDP(net(), zero=3)
    optimizer = optim.AdamW(model.parameters())
    loss_of(model, words(rank, 0)).backward()
    optimizer.step()
    before = set(optimizer.state)
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    return set(optimizer.state) == before and set(before) == set(model.parameters())


def test_a_step_that_raises():
    assert run_ranks(failing, 2) == [True, True]
