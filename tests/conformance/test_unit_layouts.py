"""Training within forward in units of all kinds, and what hooks see of codes and low precision."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.conformance import test_tensor_hooks as hooks
from tests.conformance.stages import LAYOUTS, batch, check, full, loss_of, net
from tests.conformance.test_methods import instead_of_ddp


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
    check(instead_of_ddp, layout, trains_within_forward)


@pytest.mark.parametrize("wire", ["int8", "bf16"])
def test_hooks_with_codes(wire):
    """Hooks see what is not coded yet."""
    check(with_wire, "zero3", wire)


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
