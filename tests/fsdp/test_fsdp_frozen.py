"""Frozen bases with adapters (LoRA): what is trained, and how often the base is gathered."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fastsync import FastDDP, Zero, fully_shard
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import OPTIMIZERS, farthest, whole
from tests.helpers.teams import run_ranks

SIDE, RANK, LAYERS, BATCHES = 12, 2, 3, 3


class Adapted(nn.Module):
    """A frozen matrix, and two small ones that are trained beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.down, self.up = nn.Linear(SIDE, RANK, bias=False), nn.Linear(RANK, SIDE, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(LAYERS)))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, SIDE, generator=generator)


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def by_layers():
    """A base and its adapters in one unit."""
    model = adapted()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def by_bases():
    """Each base is a unit, and all adapters are the root's."""
    model = adapted()
    for layer in model:
        fully_shard(layer.base)
    return fully_shard(model)


WAYS = {
    "a unit per layer": by_layers,
    "bases apart": by_bases,
    "zero=3": lambda: FastDDP(adapted(), zero=Zero(3, units=[nn.Linear])),
}


def train(model, ranks, steps=3):
    """Steps on several batches each, of these ranks."""
    optimizer = OPTIMIZERS["adamw"](trained(model))
    for step in range(steps):
        for micro in range(BATCHES):
            for rank in ranks:
                loss = model(batch(rank, BATCHES * step + micro)).square().mean()
                (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapters(rank, world, way):
    model = train(WAYS[way](), [rank])
    frozen = [param for param in model.parameters() if not param.requires_grad]
    assert all(param.grad is None for param in frozen)
    return whole(model.parameters())


@pytest.mark.slow(but=("a unit per layer",))
@pytest.mark.parametrize("way", WAYS)
def test_adapters_train_as_in_one_process_and_the_base_stays(way):
    start, alone = list(adapted().parameters()), train(adapted(), range(2))
    wanted = list(alone.parameters())
    for found in run_ranks(adapters, 2, way):
        assert farthest(found, wanted) <= 1e-5
        for mine, before, theirs in zip(found, start, wanted, strict=True):
            assert torch.equal(mine, before) != theirs.requires_grad


def gathers(model):
    return sum(counters["gathers"] for counters in state_of(model).context.counters())


def counted(rank, world, how):
    """By step, how many gathers; and the weights."""
    model = by_bases()
    units = [layer.base for layer in model]
    for unit in units if how != "each" else ():
        unit.set_reshard_after_forward(False)
        unit.set_reshard_after_backward(False)
    counts, optimizer = [], OPTIMIZERS["adamw"](trained(model))
    for step in range(3):
        before = gathers(model)
        for micro in range(BATCHES):
            for unit in units if how == "once a step" else ():
                unit.set_reshard_after_backward(micro == BATCHES - 1)
            model(batch(rank, BATCHES * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(gathers(model) - before)
    held = sum(not isinstance(unit.weight, DTensor) for unit in units)
    return counts, held, whole(model.parameters())


ROOTS = BATCHES  # gathers of the adapters, once for each batch
GATHERS = {
    "each": [ROOTS + 2 * BATCHES * LAYERS - BATCHES] * 3,
    "once a step": [ROOTS + LAYERS] * 3,
    "for good": [ROOTS + LAYERS, ROOTS, ROOTS],
}


@pytest.mark.parametrize("how", GATHERS)
def test_a_base_is_gathered_as_often_as_the_script_wants(how):
    wanted = list(train(adapted(), range(2)).parameters())
    for counts, held, found in run_ranks(counted, 2, how):
        assert counts == GATHERS[how]
        assert held == (LAYERS if how == "for good" else 0)
        assert farthest(found, wanted) <= 1e-5
