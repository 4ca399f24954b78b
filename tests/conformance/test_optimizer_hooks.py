"""Hooks around an optimizer's step that read or write parameters, gradients and settings."""

import types

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from tests.conformance.stages import STAGES, batch, check, full, loss_of, net, train, whole


def averages(model):
    """Return an average of each parameter, and what updates it as a hook does."""
    ema = {name: whole(p) for name, p in model.named_parameters()}

    def update(*_):
        for name, p in model.named_parameters():
            ema[name].lerp_(whole(p), 0.3)

    return ema, update


def with_averages(model, ema):
    return full(model) | {f"ema of {name.removeprefix('module.')}": t for name, t in ema.items()}


def averages_in_a_post_hook(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    ema, update = averages(model)
    optimizer.register_step_post_hook(update)
    train(model, optimizer, rank)
    return with_averages(model, ema)


def averages_in_a_hook_from_before_wrapping(wrap, rank):
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append([whole(p) for p in params()]))
    model = wrap(module)
    params = model.parameters
    train(model, optimizer, rank)
    return {f"{step}, {i}": t for step, each in enumerate(seen) for i, t in enumerate(each)}


def averages_in_a_hook_of_all_optimizers(wrap, rank, before_wrapping):
    found = []

    def look(optimizer, *_):
        found.append([whole(p) for p in model.parameters()])

    handle = torch_optimizer.register_optimizer_step_post_hook(look) if before_wrapping else None
    model = wrap(net())
    if handle is None:
        handle = torch_optimizer.register_optimizer_step_post_hook(look)
    try:
        train(model, torch.optim.AdamW(model.parameters(), 0.01), rank)
    finally:
        handle.remove()
    return {f"{step}, {i}": t for step, each in enumerate(found) for i, t in enumerate(each)}


def averages_in_a_patched_step(wrap, rank):
    """A script replaces `optimizer.step`, and a scheduler wraps what it finds there."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    ema, update = averages(model)
    step = optimizer.step

    def step_and_average(self, closure=None):
        step()
        update()

    optimizer.step = types.MethodType(step_and_average, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(rank, number))).backward()
        optimizer.step()
        scheduler.step()
    return with_averages(model, ema)


def decays_in_a_post_hook(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def decay(*_):
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.9)

    optimizer.register_step_post_hook(decay)
    train(model, optimizer, rank)
    return full(model)


def writes_gradients_in_place_in_a_pre_hook(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def centre(*_):
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    optimizer.register_step_pre_hook(centre)
    train(model, optimizer, rank)
    return full(model)


def drops_gradients_in_a_pre_hook(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    calls = []

    def drop(*_):
        calls.append(0)
        for i, p in enumerate(model.parameters()):
            if (i + len(calls)) % 3 == 0:
                p.grad = None

    optimizer.register_step_pre_hook(drop)
    train(model, optimizer, rank, range(4))
    return full(model)


def writes_parameters_in_a_pre_hook(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def decay(*_):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)

    optimizer.register_step_pre_hook(decay)
    train(model, optimizer, rank)
    return full(model)


def writes_in_a_pre_hook_of_all_optimizers(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def scale(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad * 2
            group["weight_decay"] = 0.5

    handle = torch_optimizer.register_optimizer_step_pre_hook(scale)
    try:
        train(model, optimizer, rank)
    finally:
        handle.remove()
    return full(model)


def changes_settings_in_hooks(wrap, rank):
    """The learning rate follows from one hook before the step, momentum from one after it."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.1)

    def warm_up(optimizer, *_):
        for group in optimizer.param_groups:
            group["lr"] *= 1.5

    def more_momentum(optimizer, *_):
        for group in optimizer.param_groups:
            group["momentum"] += 0.2
        optimizer.seen = getattr(optimizer, "seen", 0) + 1

    optimizer.register_step_pre_hook(warm_up)
    optimizer.register_step_post_hook(more_momentum)
    train(model, optimizer, rank)
    group = optimizer.param_groups[0]
    numbers = torch.tensor([group["lr"], group["momentum"], float(optimizer.seen)])
    return full(model) | {"settings": numbers}


def registers_hooks_between_steps(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    ema, update = averages(model)
    train(model, optimizer, rank, range(1))
    handle = optimizer.register_step_post_hook(update)

    def double(*_):
        for p in model.parameters():
            p.grad.mul_(2)

    optimizer.register_step_pre_hook(double)
    train(model, optimizer, rank, range(2))
    handle.remove()
    train(model, optimizer, rank, range(1))
    return with_averages(model, ema)


def zeroes_in_a_pre_hook_before_a_closure(wrap, rank):
    """Torch calls a closure after all hooks before the step. In it is the first forward, too."""
    model = wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad())
    for step in range(3):

        def closure(step=step):
            loss = loss_of(model(batch(rank, step)))
            loss.backward()
            return loss

        optimizer.step(closure)
    return full(model)


def steps_one_optimizer_in_the_hook_of_another(wrap, rank):
    model = wrap(net())
    params = list(model.parameters())
    first = torch.optim.AdamW(params[:3], 0.01)
    second = torch.optim.SGD(params[3:], 0.1, momentum=0.9)
    seen = []
    first.register_step_post_hook(lambda *_: second.step())
    second.register_step_post_hook(lambda *_: seen.extend(whole(p) for p in params))
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        first.step()
    return full(model) | {str(i): t for i, t in enumerate(seen)}


def evaluates_in_a_post_hook(wrap, rank):
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []

    def evaluate(*_):
        with torch.no_grad():
            losses.append(loss_of(model(batch(0, 99))))

    optimizer.register_step_post_hook(evaluate)
    train(model, optimizer, rank)
    return full(model) | {"losses": torch.stack(losses)}


SCRIPTS = [
    averages_in_a_post_hook,
    averages_in_a_patched_step,
    decays_in_a_post_hook,
    writes_gradients_in_place_in_a_pre_hook,
    drops_gradients_in_a_pre_hook,
    writes_parameters_in_a_pre_hook,
    writes_in_a_pre_hook_of_all_optimizers,
    changes_settings_in_hooks,
    registers_hooks_between_steps,
    zeroes_in_a_pre_hook_before_a_closure,
    steps_one_optimizer_in_the_hook_of_another,
    evaluates_in_a_post_hook,
]


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_hooks_see_and_change_what_they_do_under_ddp(script, stage):
    check(script, stage)


def test_the_first_forward_is_that_of_a_closure():
    """`fully_shard` learns there which modules make one model."""
    check(zeroes_in_a_pre_hook_before_a_closure, "fully_shard")


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("before_wrapping", [False, True])
def test_hooks_of_all_optimizers_see_what_they_do_under_ddp(before_wrapping, stage):
    check(averages_in_a_hook_of_all_optimizers, stage, before_wrapping)


@pytest.mark.slow(but=("zero1-small", "zero3"))
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "fully_shard"])
def test_hooks_from_before_wrapping_see_what_they_do_under_ddp(stage):
    """fully_shard() makes other parameters, which such an optimizer does not have."""
    check(averages_in_a_hook_from_before_wrapping, stage)


class _Derived(torch.optim.AdamW):
    """Its step calls that of AdamW, for which torch calls hooks once more."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)


def derived(wrap, rank, hooked):
    torch.optim.AdamW([torch.zeros(1)])  # from when on torch calls hooks in its step
    model = wrap(net(), shard_by="element")
    optimizer = _Derived(model.parameters(), 0.05)
    train(model, optimizer, rank, range(1))
    ema, update = averages(model)
    if hooked:
        optimizer.register_step_post_hook(update)
    train(model, optimizer, rank, range(2))
    return with_averages(model, ema)


@pytest.mark.slow(but=("zero1-small",))
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage[:5] in ("zero1", "zero2")])
def test_hooks_that_torch_calls_twice_are_an_error(stage):
    check(derived, stage, False)
    check(derived, stage, True, error="base class.*after step\\(\\)")
