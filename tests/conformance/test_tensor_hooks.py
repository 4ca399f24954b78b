"""Hooks on parameters: of `register_hook` and `register_post_accumulate_grad_hook`."""

from functools import partial

import pytest
import torch

from tests.conformance.stages import LAYOUTS, STAGES, batch, check, full, loss_of, net, train


def trained(wrap, rank, before=None, after=None, steps=train):
    """Train with hooks that `before` registers on the bare model, and `after` on the wrapped.

    Each gets the model and a list for what hooks see, which is part of the result.
    """
    seen = []
    model = net()
    if before is not None:
        before(model, seen)
    model = wrap(model)
    if after is not None:
        after(model, seen)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return {**full(model), **{f"seen {i}": each for i, each in enumerate(seen)}}


def note(model, seen):
    """See the gradients of some parameters, in the order in which they come."""
    for name, param in model.named_parameters():
        if name.endswith(("first.weight", "head.bias")):
            param.register_hook(lambda grad: seen.append(grad.clone()))


def double(model, _):
    for param in model.parameters():
        param.register_hook(lambda grad: 2.0 * grad)


def clip(model, _):
    """Each rank's own gradients are clipped, before they are averaged."""
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def drop_on_a_condition(model, _):
    for param in model.parameters():
        param.register_hook(lambda grad: torch.where(grad.isfinite(), grad, 0.0))


def several(model, seen):
    for param in model.parameters():
        param.register_hook(lambda grad: grad + 1.0)
        param.register_hook(lambda grad: grad * 3.0)
    note(model, seen)


def halve(grad):
    grad.mul_(0.5)


def change_in_place(model, _):
    for param in model.parameters():
        param.register_hook(halve)


KINDS = [note, double, clip, drop_on_a_condition, several, change_in_place]


def before_wrapping(wrap, rank, kind):
    return trained(wrap, rank, before=kind)


def after_wrapping(wrap, rank, kind):
    return trained(wrap, rank, after=kind)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", [*STAGES, *LAYOUTS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", [before_wrapping, after_wrapping])
def test_register_hook(stage, kind, script):
    check(script, stage, kind)


def registered_between_forward_and_backward(wrap, rank):
    model, seen = wrap(net()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(batch(rank, step)))
        handles = [
            param.register_hook(lambda grad: 2.0 * grad)
            for group in optimizer.param_groups
            for param in group["params"]
        ]
        loss.backward()
        for handle in handles:
            handle.remove()
        optimizer.step()
    return {**full(model), "calls": torch.tensor(len(seen))}


def removed_after_a_step(wrap, rank):
    """Remove hooks by handles from before and after wrapping."""
    model = net()
    early = [param.register_hook(lambda grad: 2.0 * grad) for param in model.parameters()]
    model = wrap(model)
    late = [param.register_hook(lambda grad: grad - 1.0) for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, rank, range(2))
    for handle in early:
        handle.remove()
    train(model, optimizer, rank, range(2, 3))
    for handle in late:
        handle.remove()
    train(model, optimizer, rank, range(3, 4))
    return full(model)


def step_every_other_time(model, optimizer, rank, backwards=4):
    """Let every other backward add to what the one before has left."""
    for step in range(backwards):
        loss_of(model(batch(rank, step))).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def while_accumulating(wrap, rank):
    """Hooks see the gradient of each backward alone."""

    def register(model, seen):
        note(model, seen)
        double(model, seen)

    return trained(wrap, rank, after=register, steps=step_every_other_time)


def inside_of_forward(wrap, rank):
    """On what the forward computes with, once."""

    def register(model, seen):
        def first(module, *_):
            handle.remove()
            module.head.weight.register_hook(lambda grad: seen.append(grad.clone()))

        handle = model.register_forward_pre_hook(first)

    return trained(wrap, rank, before=register)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "script",
    [registered_between_forward_and_backward, removed_after_a_step, while_accumulating],
)
def test_when_hooks_are_registered(stage, script):
    check(script, stage)


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
def test_hooks_inside_of_forward(stage):
    check(inside_of_forward, stage)


def halve_gradient(param):
    param.grad.mul_(0.5)


def scale_what_is_accumulated(model, _):
    """The same whether it is scaled before or after ranks average."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve_gradient)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("script", [before_wrapping, after_wrapping])
def test_post_accumulate_hooks(stage, script):
    check(script, stage, scale_what_is_accumulated)


def on_top_of_averages(wrap, rank):
    """Hooks see the sum of a backward and the averages of the one before, and scale it."""
    steps = partial(step_every_other_time, backwards=6)
    return trained(wrap, rank, before=scale_what_is_accumulated, steps=steps)


@pytest.mark.slow(but=("zero1-small",))
@pytest.mark.parametrize("stage", STAGES)
def test_post_accumulate_hooks_on_top_of_averages(stage):
    check(on_top_of_averages, stage)
