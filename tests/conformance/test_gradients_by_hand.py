"""Gradients that a script resets, zeroes or sets by itself, at any time of a step."""

import pytest
import torch

from tests.conformance.stages import LAYOUTS, STAGES, batch, check, full, loss_of, net


def inner(model):
    return getattr(model, "module", model)


def resets_the_module(model, _):
    model.zero_grad()


def zeroes_the_module(model, _):
    model.zero_grad(set_to_none=False)


def resets_the_inner_module(model, _):
    inner(model).zero_grad()


def resets_a_layer(model, _):
    inner(model).head.zero_grad()


def resets_by_hand(model, _):
    for param in model.parameters():
        param.grad = None


def resets_some_by_hand(model, _):
    inner(model).first.weight.grad = None
    inner(model).norm.bias.grad = None


def resets_the_optimizer(_, optimizer):
    optimizer.zero_grad()


def zeroes_the_optimizer(_, optimizer):
    optimizer.zero_grad(set_to_none=False)


def zeroes_by_hand(_, optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.zero_()


def sets_by_hand(_, optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)


def sets_at_the_module(model, _):
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def scales_by_hand(model, _):
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


RESETS = [
    resets_the_module,
    zeroes_the_module,
    resets_the_inner_module,
    resets_a_layer,
    resets_by_hand,
    resets_some_by_hand,
    resets_the_optimizer,
    zeroes_the_optimizer,
    zeroes_by_hand,
    sets_by_hand,
    sets_at_the_module,
]


PLACES = {
    "between forward and backward": RESETS,
    # The gradients of a first backward are there while the second forward has run.
    "between two forwards": [resets_by_hand, zeroes_the_module, scales_by_hand, sets_at_the_module],
    "after a backward": [resets_by_hand, resets_a_layer, scales_by_hand],
}
CASES = [(place, reset) for place, resets in PLACES.items() for reset in resets]


def trains(wrap, rank, place, reset):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if place != "between forward and backward":
            optimizer.zero_grad()
            loss_of(model(batch(rank, step + 10))).backward()
        if place == "after a backward":
            reset(model, optimizer)
        loss = loss_of(model(batch(rank, step)))
        if place != "after a backward":
            reset(model, optimizer)
        loss.backward()
        optimizer.step()
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*STAGES, *LAYOUTS])
@pytest.mark.parametrize(("place", "reset"), CASES)
def test_gradients_are_what_a_script_makes_them(stage, place, reset):
    check(trains, stage, place, reset)
