"""Optimizers that run inside backward or share their state among ranks, against torch's DDP."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.distributed.optim.functional_sgd import _FunctionalSGD

from fastsync.testing import run_ranks
from tests.helpers.models import batch, build, differences, loss_of, state, wrap

SMALL = {"bucket_cap_mb": 0.002}


def in_backward(model, kind, **options):
    """The optimizer steps as soon as a bucket is reduced, and drops its gradients."""
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    return wrap(kind, model, **options), lambda: None


def after_hook(model, kind, **options):
    wrapped = wrap(kind, model, **options)
    optimizer = _OptimizerHookState(_FunctionalSGD([], lr=0.05, _allow_empty_param_list=True))
    wrapped.register_comm_hook(None, _hook_then_optimizer(default_hooks.allreduce_hook, optimizer))
    return wrapped, lambda: None


def fused(model, kind, **options):
    wrapped = wrap(kind, model, **options)
    wrapped._register_fused_optim(torch.optim.SGD, 0.05)
    return wrapped, lambda: None


def sharded_state(model, kind, **options):
    wrapped = wrap(kind, model, **options)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    return wrapped, optimizer.step


def sharded_views(model, kind, **options):
    wrapped = wrap(kind, model, **options)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=0.01
    )
    return wrapped, optimizer.step


WAYS = [in_backward, after_hook, fused, sharded_state, sharded_views]


def train(kind, rank, way, options):
    model, step = way(build("many"), kind, **options)
    start = state(model)
    for number in range(4):
        model.zero_grad()
        loss_of(model(batch("many", 10 * number + rank))).backward()
        step()
    ended = state(model)
    assert len(differences(start, ended)) == len(ended)
    return ended, [p.grad is None for p in model.parameters()]


def compare(rank, world, options):
    # torch's hook for optimizers in backward waits for a device's stream, also on the CPU.
    torch.accelerator.current_stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
    found = {}
    for way in WAYS:
        ours, our_grads = train("fast", rank, way, options)
        theirs, their_grads = train("torch", rank, way, SMALL)
        found[way.__name__] = differences(ours, theirs), our_grads == their_grads
    return found


@pytest.mark.slow("views")
@pytest.mark.parametrize(
    "options",
    [SMALL, {**SMALL, "gradient_as_bucket_view": False}],
    ids=["views", "copies"],
)
def test_same_bits_as_ddp(options):
    for found in run_ranks(compare, 2, options):
        assert found == {way.__name__: ([], True) for way in WAYS}


HOOKS = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def zero_hook(kind, rank, name, shard, options):
    model = wrap(kind, build("many"), **options)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
    )
    make = getattr(ddp_zero_hook, name)
    model.register_comm_hook(
        None, make(default_hooks.allreduce_hook, model, optimizer, shard_buckets=shard)
    )
    seen = []
    for number in range(7):
        model.zero_grad()
        loss_of(model(batch("many", 10 * number + rank))).backward()
        seen.append(state(model))
    return seen


def compare_zero_hooks(rank, world, name, shard, options):
    # torch refuses these hooks on Gloo, as the interleaved one issues collectives whenever a bucket
    # has arrived, in an order that may differ among ranks. With one bucket there is one order.
    ddp_zero_hook.dist.get_backend = lambda group=None: "not gloo"
    ours, theirs = (zero_hook(kind, rank, name, shard, options) for kind in ("fast", "torch"))
    moved = len(differences(ours[0], ours[-1]))
    return [differences(a, b) for a, b in zip(ours, theirs, strict=True)], moved == len(ours[0])


@pytest.mark.slow(but=("shared buckets",))
@pytest.mark.parametrize(
    ("name", "options", "shard"),
    [(HOOKS[0], SMALL, False), (HOOKS[0], SMALL, True), (HOOKS[1], {}, False)],
    ids=["whole buckets", "shared buckets", "interleaved"],
)
def test_hooks_that_step_a_sharded_optimizer(name, options, shard):
    for found, moved in run_ranks(compare_zero_hooks, 2, name, shard, options):
        assert found == [[]] * 7
        assert moved


def refused(rank, world):
    texts = []
    for kind in ("fast", "torch"):
        for name in HOOKS:
            with pytest.raises(RuntimeError) as caught:
                zero_hook(kind, rank, name, False, SMALL)
            texts.append(str(caught.value))
    return texts


def test_gloo_is_refused_as_by_ddp():
    for texts in run_ranks(refused, 2):
        assert len(set(texts)) == 1
        assert "Gloo" in texts[0]


def clipped(kind, rank, norm_type):
    model = wrap(kind, build("wide"), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        (1e4 * loss_of(model(batch("wide", 10 * number + rank)))).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type))
        optimizer.step()
    return norms, state(model)


def compare_clipped(rank, world):
    found = []
    for norm_type in (2.0, float("inf")):
        ours, theirs = (clipped(kind, rank, norm_type) for kind in ("fast", "torch"))
        found.append(
            (ours[0] == theirs[0], bool(min(ours[0]) > 0.5), differences(ours[1], theirs[1]))
        )
    return found


def test_clipping_gradients():
    assert run_ranks(compare_clipped, 2) == [[(True, True, [])] * 2] * 2
