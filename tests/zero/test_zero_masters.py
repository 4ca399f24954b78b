"""zero with master_weights: models of 16 bits whose optimizers step on fp32."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim

from fastsync import FastDDP, Zero
from tests.helpers.teams import run_ranks

STEPS = 8
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.003),
    "momentum": lambda p: optim.SGD(p, 0.003, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, 0.0003),
    "adamw fused": lambda p: optim.AdamW(p, 0.0003, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.001),
    "adafactor": lambda p: optim.Adafactor(p, 0.0003),
}


class Net(nn.Module):
    """Net of bf16, with a layer of fp32 and one that is used late."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(7, 33).bfloat16()
        self.norm = nn.LayerNorm(33)
        self.last = nn.Linear(33, 3).bfloat16()
        self.late = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.uses_late = False

    def forward(self, x):
        x = self.norm(self.first(x).float()).bfloat16()
        return self.last(x.tanh()).float().square() + self.uses_late * self.late.float().sum()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=generator).bfloat16()


def backward(model, rank, step):
    module = getattr(model, "module", model)
    module.uses_late = step >= 3
    model(batch(rank, step)).mean().backward()


def by_hand(rank, make):
    """Train as mixed-precision scripts do on every rank: fp32 copies, and an optimizer of these."""
    model = FastDDP(Net(), find_unused_parameters=True)
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = OPTIMIZERS[make](masters)
    for step in range(STEPS):
        model.zero_grad()
        backward(model, rank, step)
        for param, master in zip(params, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return [p.detach().clone() for p in params]


def wrapped(zero, make, module=None):
    model = FastDDP(
        module or Net(), zero=Zero(zero, master_weights=True), find_unused_parameters=True
    )
    return model, OPTIMIZERS[make](model.parameters())


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def both(rank, world, make):
    return by_hand(rank, make), [train(*wrapped(z, make), rank, range(STEPS)) for z in (1, 2)]


@pytest.mark.slow(but=("sgd",))
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_weights_are_those_of_masters_on_every_rank(make):
    results = run_ranks(both, 2, make)
    for wanted, found in results:
        for weights in found:
            assert all(map(torch.equal, weights, wanted))


def without(rank, world):
    """The same training, whose small steps bf16 loses."""
    model = FastDDP(Net(), zero=1, find_unused_parameters=True)
    return train(model, OPTIMIZERS["sgd"](model.parameters()), rank, range(STEPS))


def test_masters_keep_what_bf16_loses():
    plain = run_ranks(without, 2)[0]
    exact = run_ranks(both, 2, "sgd")[0][0]
    assert not all(map(torch.equal, plain, exact))


def memory(rank, world):
    model, optimizer = wrapped(2, "adamw")
    train(model, optimizer, rank, range(4))
    state = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    return sum(v.to_local().numel() for v in state), {v.dtype for v in state}


def test_state_is_fp32_and_each_rank_has_its_share():
    whole = 2 * sum(p.numel() for p in Net().parameters())
    for numel, dtypes in run_ranks(memory, 3):
        assert numel < whole * 0.5 and dtypes == {torch.float32}


def resumed(rank, world, way, make, folder):
    """The second half of a training, by way of a checkpoint: the weights of the whole."""
    half = STEPS // 2
    model, optimizer = wrapped(2, make)
    train(model, optimizer, rank, range(half))
    again, other = wrapped(1, make, copy.deepcopy(model.module))
    if way == "whole":
        state = optimizer.state_dict()
        if rank == 0:
            torch.save(state, folder / "state")
        torch.distributed.barrier()
        again.load_optimizer_state_dict(other, torch.load(folder / "state", weights_only=True))
    else:
        dcp.save({"optimizer": model.optimizer_state_dict(optimizer)}, checkpoint_id=folder / "dcp")
        state = {"optimizer": again.optimizer_state_dict(other)}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # late has no state yet
        dcp.load(state, checkpoint_id=folder / "dcp", planner=planner)
        again.load_optimizer_state_dict(other, state["optimizer"])
    found = train(again, other, rank, range(half, STEPS))
    return found, train(*wrapped(1, make), rank, range(STEPS))


@pytest.mark.slow(but=("whole-sgd",))
@pytest.mark.parametrize("make", ["sgd", "adamw", "adafactor"])
@pytest.mark.parametrize("way", ["whole", "pieces"])
def test_masters_come_back_from_a_checkpoint(way, make, tmp_path):
    for found, wanted in run_ranks(resumed, 2, way, make, tmp_path):
        assert all(map(torch.equal, found, wanted))


def written(rank, world):
    """Load weights between two steps; the next step starts from them."""
    model, optimizer = wrapped(1, "sgd")
    train(model, optimizer, rank, range(2))
    with torch.no_grad():
        model.module.first.weight.fill_(4.0)
        model.module.last.bias[1] = -2.0
    train(model, optimizer, rank, range(2, 3))
    return model.module.first.weight.float(), model.module.last.bias.float()


def test_masters_follow_what_is_written_to_parameters():
    for weight, bias in run_ranks(written, 2):
        assert (weight - 4.0).abs().max() < 0.1
        assert abs(bias[1] + 2.0) < 0.1 and bias[[0, 2]].abs().max() < 1.0


def rounded(rank, world):
    """Torch loads into an optimizer that zero does not know yet, and rounds masters."""
    model, optimizer = wrapped(1, "adamw")
    train(model, optimizer, rank, range(2))
    state = optimizer.state_dict()
    again, other = wrapped(1, "adamw")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"model\.load_optimizer_state_dict"):
        train(again, other, rank, range(1))
    return True


def test_masters_that_torch_has_rounded_are_an_error():
    assert run_ranks(rounded, 2) == [True, True]


def refused(rank, world):
    with pytest.raises(ValueError, match=r"Zero\(1, master_weights=True\)"):
        FastDDP(Net(), zero=Zero(master_weights=True))
    return True


def test_masters_without_zero_are_refused():
    assert run_ranks(refused, 2) == [True, True]
