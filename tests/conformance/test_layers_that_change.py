"""Layers that a script adds to the module, or replaces, after it was wrapped.

DDP trains such parameters on each rank by itself, so that the ranks diverge without a word.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from fastsync import FastDDP
from tests.conformance.stages import Net, batch, check, full, loss_of, net, train
from tests.helpers.teams import run_ranks

REDUCING = ("zero0", "zero1", "zero1-small", "zero2")
ADDED = r"about to step on parameter '{}'( and \d more)?, which the module got after it was wrapped"


class Growing(Net):
    """Net with room for a layer in the middle."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Identity()

    def forward(self, x):
        return self.head(torch.tanh(self.extra(self.norm(self.first(x)))))


def adam(params):
    return torch.optim.AdamW(params, 0.01)


def extend(module):
    torch.manual_seed(7)
    module.extra = nn.Linear(7, 7)
    return module.extra


def to_a_group(module, optimizer):
    optimizer.add_param_group({"params": list(extend(module).parameters())})
    return [optimizer]


def to_an_optimizer_of_its_own(module, optimizer):
    return [optimizer, adam(extend(module).parameters())]


def to_a_new_optimizer(module, optimizer):
    extend(module)
    return [adam(module.parameters())]


def adopted_later(module, optimizer):
    """The optimizer has had the layer for a step before the module has."""
    torch.manual_seed(7)
    layer = nn.Linear(7, 7)
    optimizer.add_param_group({"params": list(layer.parameters())})
    optimizer.step()
    module.extra = layer
    return [optimizer]


def as_a_parameter(module, optimizer):
    class Scaled(nn.Module):
        def forward(self, x):
            return x * self.scale

    module.extra = Scaled()
    optimizer.step()
    module.extra.register_parameter("scale", nn.Parameter(torch.ones(7)))
    return [adam(module.parameters())]


def lazily(module, optimizer):
    module.extra = nn.LazyLinear(7)
    module(torch.zeros(1, 5))
    return [adam(module.parameters())]


class LowRank(nn.Module):
    def __init__(self, weight):
        super().__init__()
        torch.manual_seed(7)
        self.a = nn.Parameter(torch.randn(weight.shape[0], 2))
        self.b = nn.Parameter(torch.zeros(2, weight.shape[1]))

    def forward(self, weight):
        return weight + self.a @ self.b


def as_an_adapter(module, optimizer):
    for param in module.parameters():
        param.requires_grad_(False)
    parametrize.register_parametrization(module.first, "weight", LowRank(module.first.weight))
    return [adam(p for p in module.parameters() if p.requires_grad)]


def instead_of_another(module, optimizer):
    torch.manual_seed(7)
    module.head = nn.Linear(7, 3)
    return [adam(module.parameters())]


def in_its_place(module, optimizer):
    """The optimizer's list keeps its length."""
    old = list(module.head.parameters())
    torch.manual_seed(7)
    module.head = nn.Linear(7, 3)
    new = {id(o): n for o, n in zip(old, module.head.parameters(), strict=True)}
    params = optimizer.param_groups[0]["params"]
    params[:] = [new.get(id(p), p) for p in params]
    return [optimizer]


CHANGES = {
    to_a_group: "extra.weight",
    to_an_optimizer_of_its_own: "extra.weight",
    to_a_new_optimizer: "extra.weight",
    adopted_later: "extra.weight",
    as_a_parameter: "extra.scale",
    lazily: "extra.weight",
    as_an_adapter: "first.parametrizations.weight.0.a",
    instead_of_another: "head.weight",
    in_its_place: "head.weight",
}


def changes(wrap, rank, change, early):
    """Train, change the module, and train on. `early`: no step is made before."""
    model = wrap(net(Growing), find_unused_parameters=True)
    optimizers = [adam(model.parameters())]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step == (0 if early else 2):
            optimizers = change(model.module, *optimizers)
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REDUCING)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_is_added(change, stage):
    check(changes, stage, change, False, error=ADDED.format(CHANGES[change]))


@pytest.mark.slow(but=("zero1-small", "zero2"))
@pytest.mark.parametrize("stage", REDUCING)
def test_a_layer_is_added_after_the_first_step(stage):
    check(changes, stage, to_a_group, True, error=ADDED.format("extra.weight"))


def old_ones_stay(module, optimizer):
    """The optimizer keeps the parameters of the layer that was replaced."""
    torch.manual_seed(7)
    module.head = nn.Linear(7, 3)
    return [optimizer]


@pytest.mark.slow(but=("zero1-small", "zero2"))
@pytest.mark.parametrize("stage", REDUCING)
def test_a_replaced_layer_is_in_no_optimizer(stage):
    error = r"parameter 'head.weight' and 1 more of the module is another tensor"
    check(changes, stage, old_ones_stay, True, error=error)


class Auxiliary(Net):
    """Net with a second head, until that is removed."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(5, 3)

    def forward(self, x):
        return super().forward(x) + (0.0 if self.second is None else self.second(x))


def removes(wrap, rank):
    model = wrap(net(Auxiliary), find_unused_parameters=True)
    optimizer = adam(model.parameters())
    train(model, optimizer, rank, range(2))
    model.module.second = None
    train(model, optimizer, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(but=("zero0", "zero1-small"))
@pytest.mark.parametrize("stage", REDUCING)
def test_a_layer_is_removed(stage):
    check(removes, stage)


def unfreezes_and_wraps_anew(wrap, rank, options):
    """The optimizer goes on with more parameters, whose wrapper is another one."""
    module = net()
    module.first.requires_grad_(False)
    model = wrap(module, **options)
    optimizer = adam([param for param in model.parameters() if param.requires_grad])
    train(model, optimizer, rank, range(2))
    module.first.requires_grad_(True)
    model = wrap(module, **options)
    optimizer.add_param_group({"params": list(module.first.parameters())})
    train(model, optimizer, rank, range(2, 4))
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REDUCING)
@pytest.mark.parametrize("options", [{}, {"elastic": True}], ids=str)
def test_a_frozen_layer_is_trained_by_a_new_wrapper(options, stage):
    check(unfreezes_and_wraps_anew, stage, options)


def frozen(module, optimizer):
    for param in extend(module).parameters():
        param.requires_grad_(False)
    optimizer.add_param_group({"params": list(module.extra.parameters())})
    return [optimizer]


def unused(module, optimizer):
    module.idle = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(module.idle.parameters())})
    return [optimizer]


def beside_the_module(module, optimizer):
    """The same optimizer trains another module, which is none of the wrapper's."""
    torch.manual_seed(7)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.add_param_group({"params": list(other.parameters())})
    return [optimizer]


def averaged_by_hand(module, optimizer):
    optimizers = to_an_optimizer_of_its_own(module, optimizer)
    module._ddp_params_and_buffers_to_ignore = ["extra.weight", "extra.bias"]
    for param in module.extra.parameters():
        param.register_post_accumulate_grad_hook(average)
    return optimizers


def average(param):
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REDUCING)
@pytest.mark.parametrize("change", [frozen, unused, beside_the_module, averaged_by_hand])
def test_what_needs_no_synchronisation(change, stage):
    check(changes, stage, change, False)


def wrapped_by_itself(wrap, rank, nested):
    """Another wrapper synchronises the layer that was added."""
    model = wrap(net(Growing))
    optimizer = adam(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
        if step == 2:
            torch.manual_seed(7)
            layer = nn.Linear(7, 7)
            other = wrap(layer) if nested != "by torch" else DistributedDataParallel(layer)
            model.module.extra = other
            optimizer.add_param_group({"params": list(layer.parameters())})
    return {name.replace("extra.module", "extra"): value for name, value in full(model).items()}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REDUCING)
@pytest.mark.parametrize("nested", ["by fastsync", "by torch"])
def test_an_added_layer_has_a_wrapper_of_its_own(nested, stage):
    check(wrapped_by_itself, stage, nested)


def alone(rank, world):
    model = FastDDP(net(Growing))
    [optimizer] = to_a_group(model.module, adam(model.parameters()))
    for step in range(2):
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
    return model.module.extra.weight.grad is not None


def test_one_rank_cannot_diverge():
    assert run_ranks(alone, 1) == [True]
