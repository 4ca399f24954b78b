"""Graphs within forward, gradients of gradients, methods other than forward, changed layers."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.conformance.stages import (
    LAYOUTS,
    SHARDED_PARAMETERS,
    STAGES,
    Boxed,
    Net,
    batch,
    check,
    full,
    loss_of,
    net,
    not_under_ddp,
    trained,
)


def inner(model):
    return getattr(model, "module", model)


def smooth(x):
    return torch.tanh(x)


class Forces(Net):
    """Energies whose derivatives are outputs: a graph is differentiated within forward."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.head(smooth(self.norm(self.first(x)))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()


class FirstOrder(Net):
    """The derivative is data, and no graph of it is kept."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        hidden = self.norm(self.first(x))
        (slope,) = torch.autograd.grad(hidden.sum(), x, retain_graph=True)
        return self.head(smooth(hidden)) * slope.detach().mean()


class TwoHeads(Net):
    """The head is used twice, and the norm around it."""

    def __init__(self):
        super().__init__()
        self.back = nn.Linear(3, 7)

    def forward(self, x):
        hidden = self.norm(self.first(x))
        once = self.head(hidden)
        return self.head(self.norm(smooth(self.back(once)))) + once


def derivative_within_forward(wrap, rank):
    return trained(wrap, rank, Forces, lambda model, x: model(x))


def derivative_of_a_unit_within_forward(wrap, rank):
    return trained(wrap, rank, lambda: Boxed(Forces), lambda model, x: model(x))


def first_order_derivative_within_forward(wrap, rank):
    return trained(wrap, rank, FirstOrder, lambda model, x: loss_of(model(x)))


def gradient_penalty(wrap, rank):
    """Train as WGAN-GP does: the norm of the gradient of the output by the input is part of the
    loss.
    """

    def loss(model, x):
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return loss_of(output) + (slope.norm(dim=1) - 1.0).square().mean()

    return trained(wrap, rank, Net, loss)


def gradient_penalty_by_two_forwards(wrap, rank):
    """The penalty's forward is one of its own."""

    def loss(model, x):
        fake = x.roll(1, 0).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(model(fake).sum(), fake, create_graph=True)
        return loss_of(output) + slope.square().mean()

    return trained(wrap, rank, Net, loss)


def uses_a_head_twice(wrap, rank):
    return trained(wrap, rank, TwoHeads, lambda model, x: loss_of(model(x)))


def first_order_gradients_outside(wrap, rank):
    """Take gradients of the input, without a graph, before a backward that trains."""

    def loss(model, x):
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(loss_of(output), x, retain_graph=True)
        return loss_of(output) * (1.0 + slope.norm().detach())

    return trained(wrap, rank, Net, loss)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*STAGES, *LAYOUTS])
@pytest.mark.parametrize(
    "script",
    [
        derivative_within_forward,
        derivative_of_a_unit_within_forward,
        first_order_derivative_within_forward,
        uses_a_head_twice,
    ],
)
def test_graphs_within_forward(stage, script):
    check(script, stage)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*SHARDED_PARAMETERS, *LAYOUTS])
@pytest.mark.parametrize(
    "script", [gradient_penalty, gradient_penalty_by_two_forwards, first_order_gradients_outside]
)
def test_gradients_of_gradients(stage, script):
    check(instead_of_ddp, stage, script)


def instead_of_ddp(wrap, rank, script):
    """Under DDP, whose backward hooks refuse a second backward of one forward, by hand."""
    probe = wrap(nn.Linear(1, 1))
    if type(probe) is not DistributedDataParallel:
        return script(wrap, rank)
    return script(lambda module, **_: Averaged(module), rank)


class Averaged(nn.Module):
    """Averages gradients over the ranks as they are accumulated, without a wrapper's engine."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(average)

    def forward(self, *args):
        return self.module(*args)


def average(param):
    torch.distributed.all_reduce(param.grad, op=torch.distributed.ReduceOp.AVG)


def a_group_used_twice(wrap, rank):
    """`fully_shard([norm, head])`, where the head runs twice in one forward."""
    probe = wrap(nn.Linear(1, 1))
    if type(probe) is DistributedDataParallel:
        return trained(wrap, rank, TwoHeads, lambda model, x: loss_of(model(x)))

    def shard(module):
        fastsync.fully_shard([module.norm, module.head])
        return fastsync.fully_shard(module)

    return trained(shard, rank, TwoHeads, lambda model, x: loss_of(model(x)))


def test_a_group_used_twice():
    check(a_group_used_twice, "fully_shard")


class Encoder(Net):
    def encode(self, x):
        return self.head(smooth(self.norm(self.first(x))))


def calls_a_method(wrap, rank):
    """Without synchronisation under DDP, so for its output alone."""
    model = wrap(net(Encoder))
    return {"output": inner(model).encode(batch(rank, 0)).detach().clone()}


def calls_a_registered_method(wrap, rank):
    model = wrap(net(Encoder))
    fastsync.register_fsdp_forward_method(inner(model), "encode")
    return {"output": inner(model).encode(batch(rank, 0)).detach().clone()}


def test_a_method_names_the_remedy():
    check(calls_a_method, "zero3", error="register_fsdp_forward_method")


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_a_registered_method(stage):
    check(calls_a_registered_method, stage)


def test_a_method_that_calls_units():
    check(calls_a_method, "fully_shard")


def replaces_a_layer(wrap, rank):
    """The optimizer is made anew, as after a change of the head for fine-tuning."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        if step == 1:
            torch.manual_seed(rank)
            inner(model).head = nn.Linear(7, 3)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
    return full(model)


def adds_a_parameter(wrap, rank):
    model = wrap(net())
    loss_of(model(batch(rank, 0))).backward()
    inner(model).register_parameter("scale", nn.Parameter(torch.ones(3)))
    loss_of(model(batch(rank, 1))).backward()
    return full(model)


def replaces_a_layer_past_setattr(wrap, rank):
    """Replace a layer where it stays unnoticed until an optimizer steps on its parameters."""
    model = wrap(net())
    loss_of(model(batch(rank, 0))).backward()
    inner(model)._modules["head"] = nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model(batch(rank, 1))).backward()
    optimizer.step()
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
@pytest.mark.parametrize(
    "script",
    [replaces_a_layer, adds_a_parameter, replaces_a_layer_past_setattr],
)
def test_changed_layers_are_an_error(stage, script):
    error = "parameter '.*(head.weight|scale)' .* not synchronised"
    check(not_under_ddp, stage, script, error=error)


def removes_and_freezes(wrap, rank):
    """Remove and freeze layers: neither needs synchronisation any more."""
    model = wrap(net())
    loss_of(model(batch(rank, 0))).backward()
    inner(model).head = nn.Identity()
    inner(model).extra = nn.Linear(2, 2).requires_grad_(False)
    loss_of(model(batch(rank, 1))).backward()
    return {}


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_layers_that_are_removed_or_frozen(stage):
    check(not_under_ddp, stage, removes_and_freezes)
