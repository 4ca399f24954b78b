"""Situations of the other files, with parameters in one unit, and in units below a FastDDP."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.conformance import test_data_assignment as data
from tests.conformance import test_gradients_by_hand as by_hand
from tests.conformance import test_methods as methods
from tests.conformance import test_outputs as outputs
from tests.conformance import test_tensor_hooks as hooks
from tests.conformance.stages import batch, check, full, loss_of, net
from tests.conformance.test_outputs import Script

LAYOUTS = {
    # The root has all parameters, and keeps them between forward and backward.
    "one unit": lambda module: fastsync.fully_shard(module),
    "one unit that stays": lambda module: fastsync.fully_shard(module, reshard_after_forward=False),
    "one unit that goes": lambda module: fastsync.fully_shard(module, reshard_after_forward=True),
    # Units below a root that has parameters of its own.
    "units of FastDDP": lambda module: fastsync.FastDDP(
        module, zero=fastsync.Zero(3, units=[nn.Linear])
    ),
}


def laid_out(wrap, rank, layout, script, *args):
    """Run the script with a wrapper of that layout, where it does not run under DDP."""
    if type(wrap(nn.Linear(1, 1))) is not DistributedDataParallel:
        wrap = lambda module, **_: LAYOUTS[layout](module)  # noqa: E731
    return script(wrap, rank, *args)


def check_laid_out(layout, script, *args, error=None):
    check(Script(laid_out, layout, script, *args), "zero3", error=error)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reset", by_hand.RESETS)
def test_gradients_by_hand(layout, reset):
    check_laid_out(layout, by_hand.between_forward_and_backward, reset)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reset", [by_hand.scales_by_hand, by_hand.sets_at_the_module])
def test_gradients_between_two_forwards(layout, reset):
    check_laid_out(layout, by_hand.between_two_forwards, reset)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [hooks.note, hooks.several])
@pytest.mark.parametrize("script", [hooks.before_wrapping, hooks.after_wrapping])
def test_hooks(layout, script, kind):
    check_laid_out(layout, script, kind)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "script",
    [
        outputs.in_place_on_a_view,
        outputs.in_place_on_a_view_of_the_inputs_graph,
        outputs.in_place_on_a_view_while_accumulating,
        outputs.in_place_inside,
        outputs.keeps_the_loss_as_an_attribute,
        outputs.returns_a_closure,
        outputs.returns_a_generator,
        outputs.adds_an_auxiliary_loss,
    ],
)
def test_outputs(layout, script):
    check_laid_out(layout, script)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "script",
    [
        methods.gradient_penalty,
        methods.gradient_penalty_by_two_forwards,
        methods.first_order_gradients_outside,
    ],
)
def test_gradients_of_gradients(layout, script):
    check(Script(laid_out_or_averaged, layout, script), "zero3")


def laid_out_or_averaged(wrap, rank, layout, script):
    if type(wrap(nn.Linear(1, 1))) is DistributedDataParallel:
        return methods.instead_of_ddp(wrap, rank, script)
    return laid_out(wrap, rank, layout, script)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("script", [methods.derivative_within_forward, methods.uses_a_head_twice])
def test_graphs_within_forward(layout, script):
    check_laid_out(layout, script)


@pytest.mark.slow(turns="layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("script", [data.assigns_to_data, data.assigns_an_average])
def test_assigning_to_data(layout, script):
    check_laid_out(layout, script, error=data.ASSIGNED)


@pytest.mark.parametrize("layout", ["one unit", "one unit that goes", "units of FastDDP"])
def test_writes_into_parameters(layout):
    check_laid_out(layout, data.swaps_in_an_average)


class StepInside(nn.Module):
    """Trains within forward, as Lightning's manual optimization does."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.optimizer = None

    def forward(self, x):
        for _ in range(2):
            self.optimizer.zero_grad()
            loss_of(self.net(x)).backward()
            self.optimizer.step()
        return self.net(x).detach()


def trains_within_forward(wrap, rank):
    """DDP has no hooks there by itself, so it is compared with averages by hand."""
    model = wrap(net(StepInside))
    inside = getattr(model, "module", model)
    inside.optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = {f"output {step}": model(batch(rank, step)) for step in range(3)}
    return {**full(model), **seen}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_within_forward(layout):
    check(Script(laid_out_or_averaged, layout, trains_within_forward), "zero3")


@pytest.mark.parametrize("wire", ["int8", "bf16"])
def test_hooks_with_codes(wire):
    """Hooks see what is not coded yet."""
    check(Script(with_wire, wire), "zero3")


def with_wire(wrap, rank, wire):
    """Note what hooks see in the first step alone: later weights have been coded."""
    seen = []
    module = net()
    if type(wrap(nn.Linear(1, 1))) is DistributedDataParallel:
        model = wrap(module)
    else:
        model = fastsync.FastDDP(module, zero=3, wire=wire)
    hooks.note(model, seen)
    loss_of(model(batch(rank, 0))).backward()
    return {f"seen {i}": each for i, each in enumerate(seen)}


def test_hooks_see_the_dtype_that_is_computed_in():
    check(hooks_in_low_precision, "fully_shard")


def hooks_in_low_precision(wrap, rank):
    if type(wrap(nn.Linear(1, 1))) is DistributedDataParallel:
        return {"is bf16": torch.tensor(True), "calls": torch.tensor(6)}
    model = fastsync.fully_shard(net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    seen = []
    for param in model.parameters():
        param.register_hook(lambda grad: seen.append(grad.dtype))
    loss_of(model(batch(rank, 0))).backward()
    dtypes = {dtype is torch.bfloat16 for dtype in seen}
    return {"is bf16": torch.tensor(dtypes == {True}), "calls": torch.tensor(len(seen))}
