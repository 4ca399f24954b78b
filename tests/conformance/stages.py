"""Runs one script under torch's DDP and under a stage of fastsync, and compares the results.

A script is a module-level function `script(wrap, rank)`. It builds its model, passes it to `wrap`
in place of `DistributedDataParallel`, trains, and returns tensors by name, mostly `full(model)`::

    def clamps_in_a_hook(wrap, rank):
        model = wrap(net())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        ...
        return full(model)

    @pytest.mark.parametrize("stage", STAGES)
    def test_clamps_in_a_hook(stage):
        check(clamps_in_a_hook, stage)
"""

import inspect
import re

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.config.arguments import grouped
from tests.helpers.teams import run_ranks

# Name of a stage: how it wraps. Small buckets have several leave in one backward.
STAGES = {
    "zero0": lambda net, **options: at_stage(0, net, options),
    "zero1": lambda net, **options: at_stage(1, net, options),
    "zero1-small": lambda net, **options: at_stage(1, net, {"bucket_cap_mb": 0.0001, **options}),
    "zero2": lambda net, **options: at_stage(2, net, options),
    "zero3": lambda net, **options: at_stage(3, net, options),
    "fully_shard": lambda net, **_: sharded_by_layer(net),
}
SHARDED_PARAMETERS = ("zero3", "fully_shard")
# The parameters in other units than those of each layer.
LAYOUTS = {
    # The root has all parameters, and keeps them between forward and backward.
    "one unit": lambda net, **_: fastsync.fully_shard(net),
    "one unit that stays": lambda net, **_: fastsync.fully_shard(net, reshard_after_forward=False),
    "one unit that goes": lambda net, **_: fastsync.fully_shard(net, reshard_after_forward=True),
    # Units below a root that has parameters of its own.
    "units of FastDDP": lambda net, **_: fastsync.FastDDP(
        net, zero=fastsync.Zero(3, units=[nn.Linear])
    ),
}
_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters


def at_stage(stage, net, options):
    """Wrap `net` in FastDDP at a stage, with settings named one by one."""
    return fastsync.FastDDP(net, **grouped({"zero": stage, **options}))


def sharded_by_layer(module):
    """Apply `fully_shard` to each child that has parameters, then to the module itself."""
    for child in module.children():
        if any(True for _ in child.parameters()):
            fastsync.fully_shard(child)
    return fastsync.fully_shard(module)


class Net(nn.Module):
    """Three layers whose sizes no small number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(x))))


class Boxed(nn.Module):
    """With `fully_shard` the model in the box is one unit, and not the root."""

    def __init__(self, make):
        super().__init__()
        self.net = make()

    def forward(self, x):
        return self.net(x)


def net(make=Net, seed=0):
    """Return a model with the same weights on every rank."""
    torch.manual_seed(seed)
    return make()


def batch(rank, step, *sizes):
    """Return the inputs of a rank in a step, of shape `sizes` or [4, 5]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(sizes or (4, 5), generator=generator)


def loss_of(output):
    return output.square().mean()


def usual_loss(model, x):
    return loss_of(model(x))


def train(model, optimizer, rank, steps=range(3), loss=usual_loss):
    """Make a step of the optimizer with the batch of each of these numbers."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, batch(rank, step)).backward()
        optimizer.step()


def trained(wrap, rank, make=Net, loss=usual_loss, steps=3):
    """Return what a training with `loss(model, batch)` leaves."""
    model = wrap(net(make))
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank, range(steps), loss)
    return full(model)


def full(model):
    """Return copies of all parameters and buffers by their names in the unwrapped module."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name.removeprefix("module."): whole(tensor) for name, tensor in named}


def whole(tensor):
    """Return a copy of all elements of a tensor that may be sharded. Collective if it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def check(script, stage, *args, error=None, world=2, timeout=40.0):
    """Assert that `script` has DDP's result under `stage`, or raises `error` on every rank.

    Args:
        script: `script(wrap, rank, *args)`, see the module's docstring.
        stage: a name in `STAGES` or `LAYOUTS`.
        error: a regular expression that the text of the error on every rank matches; None where
            the result has to be DDP's.
    """
    for rank, outcome in enumerate(
        run_ranks(_outcome, world, script, stage, args, timeout=timeout)
    ):
        expected, got, raised = outcome
        if error is not None:
            assert raised is not None, f"rank {rank}: no error, differs in {_apart(expected, got)}"
            assert re.search(error, raised), f"rank {rank} raised {raised}"
            continue
        assert raised is None, f"rank {rank} raised {raised}"
        assert not (apart := _apart(expected, got)), f"rank {rank}: {apart} differ from DDP's"


def _outcome(rank, world, script, stage, args):
    expected = script(_ddp, rank, *args)
    try:
        return expected, script({**STAGES, **LAYOUTS}[stage], rank, *args), None
    except Exception as error:
        return expected, None, f"{type(error).__name__}: {error}"


def _ddp(net, **options):
    """Wrap with those of the options that torch's DDP takes, too."""
    known = {name: value for name, value in options.items() if name in _DDP_OPTIONS}
    return DistributedDataParallel(net, **known)


def _apart(expected, got):
    """Return the names whose tensors differ by more than the rounding of another order of sums."""
    if expected.keys() != got.keys():
        return sorted(expected.keys() ^ got.keys())
    return [
        name
        for name, value in expected.items()
        if not torch.allclose(value, got[name], rtol=1e-5, atol=1e-6, equal_nan=True)
    ]


def not_under_ddp(wrap, rank, script):
    """Run the script under the stage alone: DDP's ranks diverge in it."""
    probe = wrap(nn.Linear(1, 1))
    return {} if type(probe) is DistributedDataParallel else script(wrap, rank)
