"""Gradients that a script resets, zeroes or sets by itself, at any time of a step."""

import pytest
import torch
import torch.distributed as dist

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


# Here scripts see unsharded parameters between a forward and the step.
UNSHARDED = ["zero0", "zero1", "zero2", "one unit", "one unit that stays"]


def computes_them(wrap, rank, after):
    """Gradients that the script computes and averages replace those of a backward, if any."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        model.zero_grad()
        if after == "after a backward":
            loss_of(model(batch(rank, step + 10))).backward()
        loss = loss_of(model(batch(rank, step)))
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()
        optimizer.step()
    return full(model)


@pytest.mark.slow(but=("after a forward-one unit", "after a backward-one unit"))
@pytest.mark.parametrize("stage", UNSHARDED)
@pytest.mark.parametrize("after", ["after a forward", "after a backward"])
def test_gradients_that_a_script_computes(stage, after):
    check(computes_them, stage, after)


def goes_on_unsharded(wrap, rank, change):
    """Parameters stay unsharded until the step, and are those after it when the script reads."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if hasattr(model, "set_reshard_after_backward"):
        model.set_reshard_after_backward(False)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        for param in model.parameters():
            if change == "in place":
                param.grad.mul_(0.5)
            elif change == "another":
                param.grad = param.grad * 0.5
        optimizer.step()
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ["fully_shard", "one unit", "one unit that stays"])
@pytest.mark.parametrize("change", ["none", "in place", "another"])
def test_parameters_that_stay_unsharded(stage, change):
    check(goes_on_unsharded, stage, change)


def clears_by_the_optimizer(wrap, rank):
    """The optimizer clears what it sees, the shards', and the script sets what it sees."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(batch(rank, step))
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return full(model)


@pytest.mark.slow(but=("one unit",))
@pytest.mark.parametrize("stage", ["one unit", "one unit that stays"])
def test_two_gradients_of_one_parameter_are_an_error(stage):
    check(clears_by_the_optimizer, stage, error="which one counts")
