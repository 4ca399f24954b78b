"""Ways through a model that differ by rank or by micro-batch, and parameters tied across units."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from fastsync import fully_shard
from tests.helpers.teams import run_ranks

SIDE = 4


class Layer(nn.Module):
    """Layer of one weight, perhaps another layer's; `use` decides whether a forward needs it."""

    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE)) if weight is None else weight

    def forward(self, x, use=True):
        return torch.tanh(x @ self.weight) if use else x


class Chain(nn.Module):
    """Layers one after the other, perhaps checkpointed."""

    def __init__(self, *layers, way=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.way = way

    def forward(self, x, use=True, layers=None):
        for layer in self.layers if layers is None else [self.layers[i] for i in layers]:
            if self.way is None:
                x = x + layer(x, use)
            else:
                x = x + checkpoint(layer, x, use, use_reentrant=self.way == "reentrant")
        return x


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, SIDE, generator=generator).requires_grad_()


def distances(model, twin, world):
    """Return how far each gradient is from the average of the copies'."""
    found = []
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
        dist.all_reduce(wanted)
        found.append(float((ours.grad.full_tensor() - wanted / world).abs().max()))
    return found


def owed_by_one(rank, world):
    """Use the first layer in only one micro-batch on one rank."""
    torch.manual_seed(0)
    model = Chain(Layer(), Layer())
    twin = copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    for each in (model, twin):
        each(batch(rank), use=rank == 0).sum().backward()
    model.set_requires_gradient_sync(True)
    for each in (model, twin):
        each(batch(rank), layers=[1]).sum().backward()
    return distances(model, twin, world)


def test_gradients_that_one_rank_alone_has_kept_are_reduced_by_all():
    for found in run_ranks(owed_by_one, 2):
        assert max(found) < 1e-6


def tied(way):
    """The first layer of the root has the weight of the last one, which is a unit."""
    torch.manual_seed(0)
    last = Layer()
    return Chain(Chain(Layer(last.weight), way=way), Chain(last, way=way))


def tied_and_checkpointed(rank, world, way):
    model = tied(way)
    twin = copy.deepcopy(model)
    fully_shard(model.layers[1].layers[0])
    fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        for each in (model, twin):
            each(batch(rank)).sum().backward()
    return distances(model, twin, world)


@pytest.mark.parametrize("way", [None, "reentrant", "other"])
def test_a_tied_weight_stays_until_its_last_use(way):
    for found in run_ranks(tied_and_checkpointed, 2, way):
        assert max(found) < 1e-6


class Shortened(Chain):
    """Skips the weights of its second layer, and all of the third, where the script says so."""

    short = True

    def forward(self, x, use=True):
        x = super().forward(x, use, layers=[0])
        x = super().forward(x, not self.short, layers=[1])
        return x if self.short else super().forward(x, use, layers=[2])


def checkpoint_that_stops(rank, world):
    """The backward of the second layer is over when the first one is computed again.

    That stops where the second layer's own checkpoint has kept its input.
    """
    torch.manual_seed(0)
    inner = Chain(Layer(), way="other")
    model = Chain(Shortened(Layer(), inner, Layer()), way="other")
    twin = copy.deepcopy(model)
    for module in (inner, model.layers[0], model):
        fully_shard(module)
    for short in (True, False):
        for each in (model, twin):
            each.layers[0].short = short
            each(batch(rank)).sum().backward()
    return distances(model, twin, world)


def test_a_forward_after_a_checkpoint_that_stopped_within_a_unit():
    for found in run_ranks(checkpoint_that_stops, 2):
        assert max(found) < 1e-6


def dictated(rank, world):
    model = tied(None)
    fully_shard(model.layers[1].layers[0], reshard_after_forward=False)
    fully_shard(model)
    model(batch(rank))
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    wanted = dict(tied(None).named_parameters(remove_duplicate=False))
    return [torch.equal(value.full_tensor(), wanted[name]) for name, value in state.items()]


def test_state_dicts_hold_shares_wherever_a_weight_is_tied():
    assert run_ranks(dictated, 2) == [[True, True]] * 2


def outdated(rank, world, keep):
    """An optimizer steps while a forward without a backward has left whole parameters."""
    torch.manual_seed(0)
    model = Chain(Layer(), Layer())
    fully_shard(model.layers[0], reshard_after_forward=not keep)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(batch(rank)).sum().backward()
    model(batch(rank))
    optimizer.step()
    found = model(batch(rank))
    with torch.no_grad():
        model.reshard()
        model.layers[0].reshard()
        return torch.equal(found, model(batch(rank)))


@pytest.mark.parametrize("keep", [True, False])
def test_no_forward_computes_with_weights_of_before_a_step(keep):
    assert run_ranks(outdated, 2, keep) == [True, True]


def outdated_early(rank, world, where, wait):
    """Step before the first forward with an optimizer, when weights have been gathered by then."""
    torch.manual_seed(0)
    model = Chain(Layer(), Layer())
    twin = copy.deepcopy(model)
    fully_shard(model.layers[0])
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
    for param in (*model.parameters(), *twin.parameters()):
        param.grad = torch.ones_like(param)
    handle = model.get_submodule(where).unshard(async_op=True)
    if wait:
        handle.wait()
    for optimizer in optimizers:
        optimizer.step()
    return torch.equal(model(batch(rank)), twin(batch(rank)))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("where", ["", "layers.0"])
def test_the_first_forward_computes_with_the_weights_of_now(where, wait):
    assert run_ranks(outdated_early, 2, where, wait) == [True, True]


def frozen_while_whole(rank, world, thaw):
    torch.manual_seed(0)
    model = Chain(Layer(), Layer())
    model.layers[0].weight.requires_grad_(not thaw)
    weights = dict(fully_shard(model).named_parameters())
    model(batch(rank))  # the root keeps its parameters for a backward that never comes
    weights["layers.0.weight"].requires_grad_(thaw)
    model(batch(rank)).sum().backward()
    return {name: weight.grad is not None for name, weight in weights.items()}


@pytest.mark.parametrize("thaw", [True, False])
def test_what_is_frozen_or_thawed_between_forwards_is_so_in_the_next(thaw):
    for found in run_ranks(frozen_while_whole, 2, thaw):
        assert found == {"layers.0.weight": thaw, "layers.1.weight": True}


def watchers(rank, world):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    before = len(_global_optimizer_pre_hooks)
    for part in (*module, module):
        fully_shard(part)
    module(torch.ones(2, 4)).sum().backward()
    return len(_global_optimizer_pre_hooks) - before


def test_a_model_asks_once_to_be_told_of_steps():
    assert run_ranks(watchers, 2) == [1, 1]
