"""Outputs that a script changes in place, returns in classes of its own, or hides."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

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
    trained,
)


class Out:
    """A class that no library knows."""

    def __init__(self, logits, extra=None):
        self.logits, self.extra = logits, extra


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = logits


@dataclass
class Inner:
    logits: torch.Tensor


@dataclass
class Outer:
    inner: Inner
    steps: int = 3


class Named(NamedTuple):
    logits: torch.Tensor


class Dictionary(dict):
    """Dictionary like the outputs of transformers: its fields are attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Distribution(Net):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


class View(Net):
    def forward(self, x):
        return super().forward(x)[:, -1]


class ViewOfInside(Net):
    """The layer whose output is changed in place is a unit of its own with `fully_shard`."""

    def forward(self, x):
        hidden = self.first(x)
        first = hidden.view(-1)[: 2 * hidden.shape[1]].view(2, -1)
        first.mul_(0.5)
        return self.head(torch.tanh(self.norm(first)))


class ViewOfLayer(nn.Module):
    """A block that returns a view, and a model that changes that."""

    def __init__(self):
        super().__init__()
        self.first, self.head = Block(), nn.Linear(7, 3)

    def forward(self, x):
        hidden = self.first(x)
        hidden.mul_(2.0).add_(1.0)
        return self.head(torch.tanh(hidden))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 8)

    def forward(self, x):
        return self.layer(x)[:, 1:]


class Wrapped(Net):
    """Returns its output as `make` says."""

    make = Out

    def forward(self, x):
        return type(self).make(super().forward(x))


class WrappedLayer(nn.Module):
    """A block inside the model returns a class of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.head = WrappedBlock(), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x).logits))


class WrappedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x):
        return Out(self.layer(x))


class Kept(Net):
    """Keeps its loss as an attribute, and returns nothing."""

    def forward(self, x):
        self.loss = loss_of(super().forward(x))


class Closure(Net):
    def forward(self, x):
        output = super().forward(x)
        return lambda: loss_of(output)


class Generator(Net):
    def forward(self, x):
        output = super().forward(x)
        return (part for part in output.unbind(0))


class Auxiliary(Net):
    """Also has a loss of its hidden state, which it keeps as an attribute."""

    def forward(self, x):
        hidden = self.norm(self.first(x))
        self.auxiliary = hidden.square().mean()
        return self.head(torch.tanh(hidden))


class Nested(Net):
    """Returns sequences of different lengths."""

    def forward(self, x):
        output = super().forward(x)
        return torch.nested.as_nested_tensor([output[:1], output[1:]], layout=torch.strided)


def train(wrap, rank, make, loss):
    """Train with `loss(model, output)`."""
    return trained(wrap, rank, make, lambda model, x: loss(model, model(x)), steps=4)


def in_place_on_a_view(wrap, rank):
    def loss(_, output):
        output.div_(torch.full((4,), 2.0))
        return loss_of(output)

    return train(wrap, rank, View, loss)


def in_place_on_a_view_of_the_inputs_graph(wrap, rank):
    """The inputs require gradients, so the backward goes on through the wrapper."""
    model = wrap(net(View))
    before = nn.Linear(5, 5)
    nn.init.eye_(before.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        output = model(before(batch(rank, step)))
        output.div_(2.0)
        loss_of(output).backward()
        optimizer.step()
    return full(model)


def in_place_on_a_view_while_accumulating(wrap, rank):
    model = wrap(net(View))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        output = model(batch(rank, step))
        output += 1.0
        loss_of(output).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return full(model)


def in_place_on_the_views_of_two_forwards(wrap, rank):
    """Each of the two backwards averages, where DDP averages the first one alone."""
    model = wrap(net(View))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_of(model(batch(rank, 2 * step + i)).div_(2.0)) for i in range(2)]
        for loss in [sum(losses)] if type(model) is DistributedDataParallel else losses:
            loss.backward()
        optimizer.step()
    return full(model)


def in_place_on_a_whole_output(wrap, rank):
    def loss(_, output):
        return loss_of(output.mul_(0.5).clamp_(-0.5, 0.5))

    return train(wrap, rank, Net, loss)


def in_place_inside(wrap, rank):
    return train(wrap, rank, ViewOfInside, lambda _, output: loss_of(output))


def in_place_on_a_view_of_a_layer(wrap, rank):
    return train(wrap, rank, ViewOfLayer, lambda _, output: loss_of(output))


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*STAGES, *LAYOUTS])
@pytest.mark.parametrize(
    "script",
    [
        in_place_on_a_view,
        in_place_on_a_view_of_the_inputs_graph,
        in_place_on_a_view_while_accumulating,
        in_place_on_the_views_of_two_forwards,
        in_place_on_a_whole_output,
        in_place_inside,
        in_place_on_a_view_of_a_layer,
    ],
)
def test_in_place(stage, script):
    check(script, stage)


MAKERS = {
    "class": Out,
    "slots": Slotted,
    "nested dataclasses": lambda logits: Outer(Inner(logits)),
    "named tuple": Named,
    "dictionary": lambda logits: Dictionary(logits=logits),
    "class in a list": lambda logits: [Out(None, {"logits": Named(logits)})],
}


def logits_of(output):
    while not isinstance(output, torch.Tensor):
        if isinstance(output, list):
            output = output[0].extra["logits"]
        output = output.inner if isinstance(output, Outer) else output.logits
    return output


def wrapped_as(name):
    """The maker is a class attribute, so that the model stays the same module."""
    return type("Wrapped", (Wrapped,), {"make": staticmethod(MAKERS[name])})


def returns_a_class(wrap, rank, name):
    loss = lambda _, output: loss_of(logits_of(output))  # noqa: E731
    return train(wrap, rank, wrapped_as(name), loss)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MAKERS)
def test_returns_a_class(stage, name):
    check(returns_a_class, stage, name)


def keeps_the_loss_as_an_attribute(wrap, rank):
    def loss(model, output):
        assert output is None
        return getattr(model, "module", model).loss

    return train(wrap, rank, Kept, loss)


def returns_a_closure(wrap, rank):
    return train(wrap, rank, Closure, lambda _, output: output())


def returns_a_generator(wrap, rank):
    return train(wrap, rank, Generator, lambda _, output: sum(map(loss_of, output)))


def returns_a_distribution(wrap, rank):
    def loss(_, output):
        return -output.log_prob(torch.ones(4, 3)).mean()

    return train(wrap, rank, Distribution, loss)


def returns_a_class_from_a_layer(wrap, rank):
    return train(wrap, rank, WrappedLayer, lambda _, output: loss_of(output))


def adds_an_auxiliary_loss(wrap, rank):
    def loss(model, output):
        return loss_of(output) + getattr(model, "module", model).auxiliary

    return train(wrap, rank, Auxiliary, loss)


def returns_nested_tensors(wrap, rank):
    def loss(_, output):
        return sum(functional.mse_loss(part, torch.ones_like(part)) for part in output.unbind())

    return train(wrap, rank, Nested, loss)


HIDDEN = [
    keeps_the_loss_as_an_attribute,
    returns_a_closure,
    returns_a_generator,
    returns_a_distribution,
    returns_a_class_from_a_layer,
    adds_an_auxiliary_loss,
    returns_nested_tensors,
]


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*SHARDED_PARAMETERS, *LAYOUTS])
@pytest.mark.parametrize("script", HIDDEN)
def test_hidden_from_hooks(stage, script):
    check(script, stage)


def of_a_box(wrap, rank, name):
    make, loss = BOXES[name]
    return train(wrap, rank, lambda: Boxed(make), loss)


def of_the_last_column(_, output):
    output.div_(2.0)
    return loss_of(output)


def of_the_kept_loss(model, _):
    return getattr(model, "module", model).net.loss


def of_the_auxiliary_loss(model, _):
    return getattr(model, "module", model).net.auxiliary


class FrozenHead(Auxiliary):
    """Nothing but the attribute leads to what is trained."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)


BOXES = {
    "view": (View, of_the_last_column),
    "attribute": (Kept, of_the_kept_loss),
    "closure": (Closure, lambda _, output: output()),
    "class": (wrapped_as("class"), lambda _, output: loss_of(output.logits)),
    "auxiliary": (FrozenHead, of_the_auxiliary_loss),
}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
@pytest.mark.parametrize("name", ["view", "attribute", "closure", "class"])
def test_in_a_box(stage, name):
    check(of_a_box, stage, name)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_an_auxiliary_loss_alone(stage):
    check(of_a_box, stage, "auxiliary")


def test_an_auxiliary_loss_alone_of_a_unit_that_is_resharded():
    error = "unit 'net' .* sharded.*set_reshard_after_forward"
    check(of_a_box, "fully_shard", "auxiliary", error=error)


def keeps_what_it_shards(wrap, rank):
    """The remedy that the error names."""

    def keep(module, **options):
        model = wrap(module, **options)
        if hasattr(model, "set_reshard_after_forward"):
            model.set_reshard_after_forward(False)
        return model

    return of_a_box(keep, rank, "auxiliary")


def test_the_remedy_for_an_auxiliary_loss_alone():
    check(keeps_what_it_shards, "fully_shard")
