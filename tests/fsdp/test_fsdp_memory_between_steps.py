"""Memory of a rank between two steps: its share of parameters, gradients and optimizer states."""

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor

from fastsync import FastDDP, fully_shard
from fastsync._torch import local_of
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import apply, farthest, mesh_of, net, train
from tests.helpers.teams import run_ranks

WIDTH, LAYERS = 96, 4


def block():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(LAYERS)), nn.Linear(WIDTH, 8))


def by_units(**options):
    model = stack()
    for block in model[:-1]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


WAYS = {
    "fully_shard": by_units,
    "kept in forward": lambda: by_units(reshard_after_forward=False),
    "zero=3": lambda: FastDDP(stack(), zero=3),
}


def held_bytes(tensors):
    """Return the bytes of storages, each counted once."""
    local = [local_of(t) if isinstance(t, DTensor) else t for t in tensors]
    storages = [t.untyped_storage() for t in local]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def wholes(model):
    found = {state_of(module) for module in model.modules()} - {None}
    units = [state.unit for state in found if state.unit is not None]
    return [member.whole for unit in units for member in unit.members]


def at_rest(rank, world, way):
    """Over 16 bytes per parameter and rank; and the bytes and the number of whole parameters."""
    model = WAYS[way]()
    optimizer = optim.AdamW(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    params = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = held_bytes([*params, *(p.grad for p in params), *states])
    numel = sum(p.numel() for p in stack().parameters())
    whole = wholes(model)
    return held / (16 * numel / world), held_bytes(whole), len(whole)


@pytest.mark.slow(but=("fully_shard-2", "zero=3-4"))
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_holds_16_bytes_per_parameter_and_rank(way, world):
    for ratio, whole, members in run_ranks(at_rest, world, way):
        assert 0.99 <= ratio <= 1.01
        assert (whole, members) == (0, 4 * LAYERS + 2)


def offloaded(rank, world, pinned):
    """Return how far weights are from those without a policy, and from FSDP2's; where everything
    lies.
    """
    policy = CPUOffloadPolicy(pin_memory=pinned)
    runs = ((fully_shard, {}), (fully_shard, {"offload_policy": policy}))
    if not pinned:  # FSDP2 pins memory where there is nothing to pin it for
        runs += ((torchs, {"offload_policy": policy}),)
    weights = []
    for shard, options in runs:
        model = apply(shard, net(), mesh=mesh_of(world), **options)
        weights.append(train(model, rank, optim.AdamW(model.parameters(), 0.01), clip=1e9)[0])
        if shard is fully_shard:
            places = {local_of(p).device.type for p in model.parameters()}
    return [farthest(weights[0], others) for others in weights[1:]], places


@pytest.mark.slow("True")
@pytest.mark.parametrize("pinned", [True, False])
def test_offloading_to_where_everything_is(pinned):
    for (apart, *beside_fsdp2), places in run_ranks(offloaded, 2, pinned):
        assert apart == 0
        assert max(beside_fsdp2, default=0) <= 2e-6
        assert places == {"cpu"}
