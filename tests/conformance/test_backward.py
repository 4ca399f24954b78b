"""Backwards that a library announces, several of them in one forward, and recomputed forwards.

Accelerate and Lightning speak to DistributedDataParallel's reducer between forward and backward:
`reducer.prepare_for_backward(...)` has the next backward synchronise.
"""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fastsync import FastDDP
from fastsync.config.arguments import grouped
from tests.conformance.stages import (
    SHARDED_PARAMETERS,
    STAGES,
    batch,
    check,
    full,
    loss_of,
    net,
    trained,
)
from tests.helpers.teams import run_ranks

# Stages whose wrapper has a reducer that reduces gradients.
REDUCING = ("zero0", "zero1", "zero1-small", "zero2")
ANNOUNCING = (*REDUCING, "zero3")


@contextlib.contextmanager
def announced(model, *outputs):
    """Do what Accelerate's `trigger_sync_in_backward` does."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward(list(outputs))
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def seen(model, optimizer):
    """Return the parameters once the optimizer has stepped on their gradients."""
    optimizer.step()
    optimizer.zero_grad()
    return full(model)


def train(wrap, rank, backwards, steps=4, **options):
    """Train with `backwards(model, step, rank)` in each step."""
    model = wrap(net(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(steps):
        backwards(model, step, rank)
        last = seen(model, optimizer)
    return last


def two_local_forwards(model, step, rank):
    with model.no_sync():
        losses = [loss_of(model(batch(rank, 2 * step + i))) for i in range(2)]
    losses[0].backward()
    with announced(model):
        losses[1].backward()


def only_the_last_of_three(model, step, rank):
    with model.no_sync():
        losses = [loss_of(model(batch(rank, 3 * step + i))) for i in range(3)]
        for loss in losses[:2]:
            loss.backward()
        with announced(model):
            losses[2].backward()


def every_backward(model, step, rank):
    with model.no_sync():
        losses = [loss_of(model(batch(rank, 2 * step + i))) for i in range(2)]
    for loss in losses:
        with announced(model, loss):
            loss.backward()


def twice_through_one_graph(model, step, rank):
    """The first backward is the forward's own; the second one is announced."""
    loss = loss_of(model(batch(rank, step)))
    loss.backward(retain_graph=True)
    with announced(model, loss):
        loss.backward()


def other_work_comes_between(model, step, rank):
    """Neither an evaluation nor `autograd.grad` is the backward that was announced."""
    with model.no_sync():
        losses = [loss_of(model(batch(rank, 2 * step + i))) for i in range(2)]
    losses[0].backward()
    with announced(model):
        with torch.no_grad():
            model(batch(rank, 99))
        x = batch(rank, step).requires_grad_()
        torch.autograd.grad(loss_of(model.module(x)), x)
        losses[1].backward()


def an_ordinary_backward(model, step, rank):
    """Announcing what would synchronise anyway changes nothing, also for what comes after."""
    loss = loss_of(model(batch(rank, 2 * step)))
    with announced(model):
        loss.backward()
    with model.no_sync():
        loss_of(model(batch(rank, 2 * step + 1))).backward()
    loss_of(model(batch(rank, 2 * step + 2))).backward()


def bare_module(model, step, rank):
    """A backward that reaches no output of the wrapper."""
    loss = loss_of(model.module(batch(rank, step)))
    with announced(model):
        loss.backward()


TWO_AVERAGES = ("every_backward", "twice_through_one_graph")
ANNOUNCED = {
    f.__name__: f
    for f in (
        two_local_forwards,
        only_the_last_of_three,
        every_backward,
        twice_through_one_graph,
        other_work_comes_between,
        an_ordinary_backward,
        bare_module,
    )
}


def announces(wrap, rank, name, options):
    # Without that DDP fails where its first two averages come without a forward in between.
    options |= {"find_unused_parameters": True} if name in TWO_AVERAGES else {}
    return train(wrap, rank, ANNOUNCED[name], **options)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ANNOUNCING)
@pytest.mark.parametrize("name", ANNOUNCED)
def test_a_backward_is_announced(name, stage):
    check(announces, stage, name, {})


@pytest.mark.slow(but=("zero1-small", "zero2"))
@pytest.mark.parametrize("stage", REDUCING)
def test_a_backward_is_announced_without_shared_memory(stage):
    check(announces, stage, "two_local_forwards", {"shared_memory": False})


class Adversaries(nn.Module):
    """A generator and a critic, whose training step is all of `forward`."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.critic = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, training_step, *args):
        return training_step(self, *args)


def manual_backward(model, loss):
    """Do what Lightning's `manual_backward` does, before the backward and after it."""
    model.require_forward_param_sync = True
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
    loss.backward()


@contextlib.contextmanager
def toggled(part, whole):
    """Freeze all parameters but those of a part, as Lightning's `toggle_optimizer` does."""
    mine = {id(param) for param in part.parameters()}
    others = [p for p in whole.parameters() if id(p) not in mine and p.requires_grad]
    for param in others:
        param.requires_grad_(False)
    yield
    for param in others:
        param.requires_grad_(True)


def adversarial_step(module, model, optimizers, x):
    """A step of a generator and one of its critic, each with its own backward."""
    parts = (module.generator, module.critic)
    for part, optimizer in zip(parts, optimizers, strict=True):
        with toggled(part, module):
            made = module.critic(module.generator(x))
            loss = loss_of(made) if part is module.generator else loss_of(made - module.critic(x))
            optimizer.zero_grad()
            manual_backward(model, loss)
            optimizer.step()
    model.require_backward_grad_sync = False  # as the forward ends


def adversaries(wrap, rank, options):
    inner = net(Adversaries)
    model = wrap(inner, find_unused_parameters=True, **options)
    optimizers = [
        torch.optim.Adam(part.parameters(), 0.01) for part in (inner.generator, inner.critic)
    ]
    for step in range(5):
        model(adversarial_step, model, optimizers, batch(rank, step))
        model.require_backward_grad_sync = True
    return full(model)


def several_losses(module, model, optimizer, x):
    """Two backwards that use all parameters, with a step after both."""
    for part in x.split(2):
        manual_backward(model, loss_of(module.critic(module.generator(part))))
    optimizer.step()
    optimizer.zero_grad()
    model.require_backward_grad_sync = False


def one_loss(module, model, optimizer, x):
    manual_backward(model, loss_of(module.critic(module.generator(x))))
    if model.static_graph and not getattr(model, "flushed", False):
        model.reducer._delay_all_reduce()  # as Lightning does after the first backward
        model.flushed = True
    optimizer.step()
    optimizer.zero_grad()
    model.require_backward_grad_sync = False


STEPS = {"several_losses": several_losses, "one_loss": one_loss}


def manual(wrap, rank, step_name, options):
    inner = net(Adversaries)
    model = wrap(inner, **options)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(5):
        model(STEPS[step_name], model, optimizer, batch(rank, step))
        model.require_backward_grad_sync = True
    return full(model)


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", ANNOUNCING)
@pytest.mark.parametrize("options", [{}, {"shared_memory": False}], ids=["memory", "network"])
def test_a_training_step_within_forward_freezes_in_turn(options, stage):
    check(adversaries, stage, options)


@pytest.mark.slow(but=("zero0", "zero2", "zero3"))
@pytest.mark.parametrize("stage", ANNOUNCING)
def test_a_training_step_within_forward_has_several_backwards(stage):
    check(manual, stage, "several_losses", {})


@pytest.mark.slow(but=("zero1", "zero3"))
@pytest.mark.parametrize("stage", ANNOUNCING)
def test_a_training_step_within_forward_of_a_static_graph(stage):
    check(manual, stage, "one_loss", {"static_graph": True})


def coded_adversaries(rank, world, wire, stage):
    """Return parameters with DDP and with a wire format."""
    ddp = adversaries(lambda net, **o: DistributedDataParallel(net, **o), rank, {})
    options = {"wire": wire, "zero": stage}
    return ddp, adversaries(lambda net, **o: FastDDP(net, **grouped(o)), rank, options)


@pytest.mark.parametrize(("wire", "stage"), [("int8", 0), ("bf16", 1), ("int8", 2)])
def test_a_training_step_within_forward_freezes_in_turn_on_a_wire(wire, stage):
    (expected, first), (_, second) = run_ranks(coded_adversaries, 2, wire, stage)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"ranks differ in {name}"
        # Five steps of Adam move an element by 0.05.
        assert (value - expected[name]).abs().max() < 0.02, name


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(x))))


def whole_wrapper(model, x):
    return loss_of(checkpoint(model, x, use_reentrant=False))


def wrapper_and_loss(model, x):
    return checkpoint(lambda x: loss_of(model(x)), x, use_reentrant=False)


def to_the_end(model, x):
    """The recomputation does not stop at the last tensor that it needs."""
    with set_checkpoint_early_stop(False):
        return loss_of(checkpoint(model, x, use_reentrant=False))


def reentrant(model, x):
    return loss_of(checkpoint(model, x.requires_grad_(), use_reentrant=True))


CHECKPOINTS = {f.__name__: f for f in (whole_wrapper, wrapper_and_loss, to_the_end, reentrant)}


def checkpointed(wrap, rank, name, make, options, accumulates=False):
    model = wrap(net(make), **options)
    # Adam would make steps of the noise that is the gradient of a bias in front of a norm.
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        if accumulates:
            with model.no_sync():
                CHECKPOINTS[name](model, batch(rank, 100 + step)).backward()
        CHECKPOINTS[name](model, batch(rank, step)).backward()
        last = seen(model, optimizer)
    return last


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REDUCING)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_wrapper_is_checkpointed(name, static, stage):
    check(checkpointed, stage, name, Normed, {"static_graph": static})


@pytest.mark.slow(turns="stage")
@pytest.mark.parametrize("stage", REDUCING)
@pytest.mark.parametrize("name", ["whole_wrapper", "wrapper_and_loss"])
def test_the_wrapper_is_checkpointed_and_accumulates(name, stage):
    check(checkpointed, stage, name, Normed, {}, True)


def differentiates_within(rank, world, stage):
    """A reentrant checkpoint has a backward of its own within that of another call."""
    model = FastDDP(net(), zero=stage)
    first, second = batch(rank, 0).split(2)
    loss = reentrant(model, first) + loss_of(model(second))
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_of_the_wrapper_within_its_own_is_refused(stage):
    for text in run_ranks(differentiates_within, 2, stage):
        assert "began during a backward of it" in text
        assert "use_reentrant=False" in text


def one_differs(rank, world, options, extra):
    """In step 3, rank 1 leaves out its backward, or makes an extra one."""
    model = FastDDP(net(), **grouped(options))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    try:
        for step in range(1, 5):
            optimizer.zero_grad()
            apart = step == 3 and rank == 1
            for _ in range(1 if not apart else 2 if extra else 0):
                loss_of(model(batch(rank, step))).backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow(but=("left out-{'zero': 1}", "extra-{'zero': 2, 'wire': 'int8'}"))
@pytest.mark.parametrize(
    "options", [{"zero": 1}, {"zero": 2}, {"zero": 2, "wire": "int8"}], ids=str
)
@pytest.mark.parametrize("extra", [False, True], ids=["left out", "extra"])
def test_a_rank_with_another_number_of_backwards_is_named(extra, options):
    behind, ahead = (0, 1) if extra else (1, 0)
    found = run_ranks(one_differs, 2, options, extra)
    for rank, text in enumerate(found):
        steps = {behind: 3 if extra else 2, ahead: 4 if extra else 3}
        assert f"rank {rank} is in step {steps[rank]}, and rank {1 - rank} in step" in text, text
        assert f"Either rank {behind} has left out a backward, or rank {ahead} has made one" in text


@pytest.mark.slow(but=("extra-1", "left out-2"))
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("extra", [False, True], ids=["left out", "extra"])
def test_another_number_of_backwards_is_named_without_shared_memory(extra, stage):
    """One rank waits for gradients, and the other one for parameters."""
    behind, ahead = (0, 1) if extra else (1, 0)
    wanted = f"either rank {behind} has left out a backward, or rank {ahead} has made one more"
    for text in run_ranks(one_differs, 2, {"zero": stage, "shared_memory": False}, extra):
        assert wanted in text, text
        assert "as many backwards" in text


def to_parameters_alone(wrap, rank):
    """As scripts of GANs do, so that the loss reaches no other module."""
    model = wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward(inputs=list(model.parameters()))
        optimizer.step()
    return full(model)


@pytest.mark.slow(but=("zero1-small", "fully_shard"))
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_to_parameters_alone(stage):
    """Shards are not what a loss was computed from."""
    if stage in SHARDED_PARAMETERS:
        assert all(run_ranks(warned_of_no_gradients, 2, stage))
    else:
        check(to_parameters_alone, stage)


def warned_of_no_gradients(rank, world, stage):
    with pytest.warns(UserWarning, match="none of whose parameters has a gradient.*leave out"):
        to_parameters_alone(STAGES[stage], rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(STAGES[stage], rank)
    return True
