"""Random numbers that scripts write into parameters and gradients: those of an unsharded model."""

import pytest
import torch
from torch import nn

import fastsync
from tests.conformance.stages import STAGES, Net, batch, check, full, loss_of, net, train, whole
from tests.helpers.teams import run_ranks


def generator(model):
    """Return what the next random number of this rank is, beside all parameters."""
    return full(model) | {"next random number": torch.rand(())}


def initialises_after_wrapping(wrap, rank):
    model = wrap(net())
    torch.manual_seed(5)
    model.apply(lambda each: each.reset_parameters() if hasattr(each, "reset_parameters") else None)
    for param in model.parameters():
        nn.init.normal_(param, 0.1)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), rank)
    return generator(model)


def adds_noise_to_parameters(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(5)
    for step in range(3):
        train(model, optimizer, rank, [step])
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param), alpha=0.1)
    return generator(model)


def masks_gradients(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(5)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.grad.add_(torch.rand_like(param.grad))
                param.grad.mul_(torch.zeros_like(param.grad).bernoulli_(0.7))
                param.grad.add_(torch.randint_like(param.grad, 3))
                param.grad.mul_(torch.randint_like(param.grad, 1, 3))
        optimizer.step()
    return generator(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "script", [initialises_after_wrapping, adds_noise_to_parameters, masks_gradients]
)
def test_random_numbers(script, stage):
    check(script, stage)


def _initialise(rank, world):
    """Return a model's weights, and those of its shards, whose memory comes after the wrapping."""
    expected = net(seed=7)
    with torch.device("meta"):
        model = Net()
    fastsync.fully_shard(model.first)
    fastsync.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    for module in model.children():
        module.reset_parameters()
    return full(expected), full(model), whole(torch.rand_like(model.head.weight))


def test_weights_of_a_model_made_on_meta():
    (expected, got, numbers), (_, again, others) = run_ranks(_initialise, 2)
    for name, weight in expected.items():
        assert torch.equal(weight, got[name]) and torch.equal(weight, again[name]), name
    assert torch.equal(numbers, others)
    assert numbers.unique().numel() == numbers.numel()  # no part repeats another's
