"""Writes to parameters past the optimizer: `.data`, copies, exchanged tensors and parameters."""

import pytest
import torch
from torch import nn

from tests.conformance.stages import (
    LAYOUTS,
    SHARDED_PARAMETERS,
    STAGES,
    batch,
    check,
    full,
    loss_of,
    net,
    not_under_ddp,
)

ASSIGNED = r"assigned to the \.data of parameter '.*weight'.*copy_"


def train(wrap, rank, write, steps=3):
    """Train, and call `write` between a step of the optimizer and the next forward."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
        write(model)
    result = full(model)
    result["output"] = model(batch(7, 0)).detach().clone()
    return result


def copies_into_data(wrap, rank):
    def write(model):
        for param in model.parameters():
            param.data.copy_(param.data.clamp(-0.2, 0.2))

    return train(wrap, rank, write)


def scales_data(wrap, rank):
    def write(model):
        for param in model.parameters():
            param.data.mul_(0.9).add_(0.001)

    return train(wrap, rank, write)


def clamps_without_gradients(wrap, rank):
    @torch.no_grad()
    def write(model):
        for param in model.parameters():
            param.clamp_(-0.3, 0.3)

    return train(wrap, rank, write)


def swaps_in_an_average(wrap, rank):
    """Evaluate with an exponential average, by copies, then go on with the weights."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    average = [param.detach().clone() for param in model.parameters()]
    seen = {}
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
        kept = []
        for param, mean in zip(model.parameters(), average, strict=True):
            mean.lerp_(param.detach(), 0.1)
            kept.append(param.detach().clone())
            param.data.copy_(mean)
        with torch.no_grad():
            seen[f"output {step}"] = model(batch(7, step)).clone()
        for param, old in zip(model.parameters(), kept, strict=True):
            param.data.copy_(old)
    return {**full(model), **seen}


def writes_after_a_forward_without_backward(wrap, rank):
    """Write as a line search does: the second forward is of other weights."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = {}
    for step in range(3):
        optimizer.zero_grad()
        losses[f"before {step}"] = loss_of(model(batch(rank, step))).detach().clone()
        for param in model.parameters():
            param.data.mul_(0.9)
        loss = loss_of(model(batch(rank, step)))
        losses[f"after {step}"] = loss.detach().clone()
        loss.backward()
        optimizer.step()
    return {**full(model), **losses}


def writes_between_forward_and_backward(wrap, rank):
    """To what backward does not need: the last bias."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(batch(rank, step)))
        for name, param in model.named_parameters():
            if name.endswith("head.bias"):
                param.data.mul_(0.5)
        loss.backward()
        optimizer.step()
    return full(model)


# Of a unit that stays whole parameters are plain tensors, which copies of shards do not mix with.
WRITTEN = [*STAGES, *(layout for layout in LAYOUTS if layout != "one unit that stays")]


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", WRITTEN)
@pytest.mark.parametrize(
    "script",
    [copies_into_data, scales_data, clamps_without_gradients, swaps_in_an_average],
)
def test_writes_into_parameters(stage, script):
    check(script, stage)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "script", [writes_after_a_forward_without_backward, writes_between_forward_and_backward]
)
def test_writes_around_a_forward(stage, script):
    check(script, stage)


def assigns_to_data(wrap, rank):
    def write(model):
        for param in model.parameters():
            param.data = param.data.clamp(-0.2, 0.2)

    return train(wrap, rank, write)


def assigns_an_average(wrap, rank):
    """The average and the weights are alive, and change places for each evaluation."""
    averages = []

    def write(model):
        if not averages:
            averages.extend(param.data.clone() for param in model.parameters())
        kept = [param.data for param in model.parameters()]
        for param, mean in zip(model.parameters(), averages, strict=True):
            mean.lerp_(param.data, 0.1)
            param.data = mean
        with torch.no_grad():
            model(batch(7, 0))
        for param, old in zip(model.parameters(), kept, strict=True):
            param.data = old

    return train(wrap, rank, write)


def assigns_before_the_first_step(wrap, rank):
    """Assign data as an initialisation by hand does."""
    model = wrap(net())
    for param in model.parameters():
        param.data = torch.ones_like(param.data)
    return {**full(model), "output": model(batch(rank, 0)).detach().clone()}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero1-small", "zero2"])
@pytest.mark.parametrize(
    "script", [assigns_to_data, assigns_an_average, assigns_before_the_first_step]
)
def test_assigns_to_data(stage, script):
    check(script, stage)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*SHARDED_PARAMETERS, *LAYOUTS])
@pytest.mark.parametrize(
    "script", [assigns_to_data, assigns_an_average, assigns_before_the_first_step]
)
def test_assigning_to_data_of_shards_is_an_error(stage, script):
    check(script, stage, error=ASSIGNED)


class Momentum(nn.Module):
    """Layers and their average, which each forward moves."""

    def __init__(self, kind):
        super().__init__()
        self.trained, self.average, self.kind = net(), net(), kind
        self.average.requires_grad_(False)

    @torch.no_grad()
    def move(self):
        pairs = zip(self.trained.parameters(), self.average.parameters(), strict=True)
        for param, mean in pairs:
            if self.kind == "assigned":
                mean.data = mean.data * 0.9 + param.data * 0.1
            elif self.kind == "in data":
                mean.data.mul_(0.9).add_(param.data, alpha=0.1)
            else:
                mean.mul_(0.9).add_(param, alpha=0.1)

    def forward(self, x):
        if self.training:
            self.move()
        return self.trained(x) - self.average(x)


class Bounded(nn.Module):
    """An embedding whose rows a forward shortens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 5, max_norm=0.5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.embedding(torch.arange(x.shape[0]) % 8))


def train_with_writes(wrap, rank, kind):
    torch.manual_seed(3)
    model = wrap(Bounded() if kind == "max_norm" else Momentum(kind))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero1-small", "zero2"])
@pytest.mark.parametrize("kind", ["in place", "assigned", "in data", "max_norm"])
def test_writes_within_a_forward(stage, kind):
    check(train_with_writes, stage, kind)


WRITTEN_TO = r"parameter '.*(weight|bias)' was written to while it was gathered"
# What the forward of the root writes to are shards of other units.
OUTCOMES = {
    ("in place", "fully_shard"): None,
    ("in data", "fully_shard"): None,
    ("assigned", "fully_shard"): ASSIGNED,
    ("assigned", "units of FastDDP"): ASSIGNED,
}


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*SHARDED_PARAMETERS, *LAYOUTS])
@pytest.mark.parametrize("kind", ["in place", "assigned", "in data", "max_norm"])
def test_writes_to_gathered_parameters_are_an_error(stage, kind):
    check(train_with_writes, stage, kind, error=OUTCOMES.get((kind, stage), WRITTEN_TO))


@pytest.mark.slow(but=("fully_shard",))
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
def test_swaps_tensors(stage):
    """DDP itself fails: swapped parameters have lost the node that it hooks."""
    check(swaps_tensors_or_halves, stage)


def swaps_tensors_or_halves(wrap, rank):
    """Under DDP, which cannot be swapped, the same by multiplication."""

    def write(model):
        for param in model.parameters():
            if hasattr(param, "full_tensor"):
                other = nn.Parameter(param.detach().clone() * 0.5)
                torch.utils.swap_tensors(param, other)
            else:
                param.data.mul_(0.5)

    return train(wrap, rank, write)


def replaces_a_parameter(wrap, rank):
    def write(model):
        inner = getattr(model, "module", model)
        inner.head.weight = nn.Parameter(torch.zeros(3, 7))

    return train(wrap, rank, write)


def removes_a_parameter(wrap, rank):
    def write(model):
        inner = getattr(model, "module", model)
        inner.head.bias = None

    return train(lambda module: wrap(module, find_unused_parameters=True), rank, write)


def trains_what_follows_from_parameters(wrap, rank):
    """As `functional_call` is used to train masks, or steps of an inner optimizer."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        made = {name: param * 1.5 for name, param in model.named_parameters()}
        loss_of(torch.func.functional_call(model, made, (batch(rank, step),))).backward()
        optimizer.step()
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
def test_trains_what_follows_from_parameters(stage):
    error = "result of a computation" if stage in SHARDED_PARAMETERS else None
    check(trains_what_follows_from_parameters, stage, error=error)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", SHARDED_PARAMETERS)
@pytest.mark.parametrize("script", [replaces_a_parameter, removes_a_parameter])
def test_another_parameter_is_an_error(stage, script):
    """DDP goes on without it: its ranks diverge, or its forward raises."""
    check(not_under_ddp, stage, script, error="parameter '.*(weight|bias)' was")


def last_row(tensor):
    tensor[-1].zero_()


def second_half(tensor):
    tensor.chunk(2, 0)[1].mul_(0.5)


def by_position(tensor):
    tensor.view(-1)[1:3].fill_(0.25)


def random_row(tensor):
    tensor.select(0, 0).uniform_(-1.0, 1.0)


def assigned_row(tensor):
    tensor[0] = 0.5


def writes_into_a_part(wrap, rank, write, what):
    torch.manual_seed(5)
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        if step == 1:
            for param in model.parameters():
                write({"data": param.data, "gradient": param.grad}[what])
        optimizer.step()
    return full(model)


PARTS = (last_row, second_half, by_position, random_row, assigned_row)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write", PARTS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("what", ["data", "gradient"])
def test_writes_into_a_part(what, write, stage):
    """Torch makes no such view of a DTensor whose parts have unequal sizes."""
    copied = "writes into a part of a DTensor.*that part is a copy|Cannot flatten unevenly sharded"
    error = copied if stage in SHARDED_PARAMETERS else None
    check(writes_into_a_part, stage, write, what, error=error)


def columns(tensor):
    """Parts of the local tensor, where the first dimension is sharded."""
    if tensor.dim() > 1:
        tensor[:, 0].zero_()
        tensor.t()[1].mul_(2.0)
        tensor[:, 2] = 0.5


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["data", "gradient"])
def test_writes_into_columns(what, stage):
    check(writes_into_a_part, stage, columns, what)
