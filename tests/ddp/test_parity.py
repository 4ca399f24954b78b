"""Training with FastDDP gives the weights that training with torch's DDP gives."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.helpers import models
from tests.helpers.models import batch, build, differences, grads, loss_of, state, wrap
from tests.helpers.teams import run_ranks

STEPS = 20


def train(
    kind,
    name,
    optimizer,
    rank,
    steps=STEPS,
    accumulate=1,
    clip=None,
    keep=False,
    wide=False,
    **options,
):
    """Weights and buffers after `steps` steps; `wide`: in fp64."""
    model = wrap(kind, build(name).double() if wide else build(name), **options)
    opt = models.OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        opt.zero_grad(set_to_none=not keep)
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with nullcontext() if last else model.no_sync():
                x = batch(name, 1000 * step + 10 * micro + rank)
                loss_of(model(x.double() if wide else x)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
    return state(model.module)


def train_both(rank, world, cases):
    """For each case, the names whose bits differ between FastDDP and DDP."""
    found = []
    for name, optimizer, shared, fast_only in cases:
        ours = train("fast", name, optimizer, rank, **shared, **fast_only)
        theirs = train("torch", name, optimizer, rank, **shared)
        found.append(differences(ours, theirs))
    return found


def check_same(cases, world=2, timeout=120):
    for rank, found in enumerate(run_ranks(train_both, world, cases, timeout=timeout)):
        for case, names in zip(cases, found, strict=True):
            assert not names, f"{case}: {names} differ from DDP on rank {rank}"


@pytest.mark.slow(but=("conv",))
@pytest.mark.parametrize("name", models.MODELS)
def test_weights_equal_ddp_to_the_last_bit(name):
    tiny = {"bucket_cap_mb": 0.002}
    check_same([(name, optimizer, {}, tiny) for optimizer in models.OPTIMIZERS])


def train_on_ranks(rank, world, name):
    options = {"steps": 20, "bucket_cap_mb": 0.002, "wide": True}
    ours = train("fast", name, "adamw", rank, **options)
    theirs = train("torch", name, "adamw", rank, **options)
    return ours, theirs


@pytest.mark.slow("3", "4")
@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_world_sizes(world):
    """All ranks hold the same bits. The order of a sum over three is the backend's business.

    In fp64, since AdamW makes whole steps of a gradient that is nothing but rounding errors.
    """
    results = run_ranks(train_on_ranks, world, "many")
    for ours, theirs in results:
        assert not differences(ours, results[0][0])
        for name, value in ours.items():
            assert torch.allclose(value, theirs[name], rtol=1e-9, atol=1e-9), name
    if world == 1:
        assert not differences(*results[0])


def one_backward(kind, model, x, **options):
    wrapped = wrap(kind, model, **options)
    for _ in range(3):  # also under the plan that follows the first step
        wrapped.zero_grad()
        wrapped(x).float().square().mean().backward()
    return grads(wrapped)


def compare_formats(rank, world):
    torch.manual_seed(rank)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    found = {}
    for label, options in {"views": {}, "no views": {"gradient_as_bucket_view": False}}.items():
        conv = [build("conv").to(memory_format=torch.channels_last) for _ in range(2)]
        ours = one_backward("fast", conv[0], images, **options)
        theirs = one_backward("torch", conv[1], images, **options)
        strides = [p.grad.stride() == p.stride() for p in conv[0].parameters()]
        found[f"channels last, {label}"] = differences(ours, theirs) + [s for s in strides if not s]
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            x = torch.randn(4, 256, dtype=dtype)
            ours = one_backward("fast", build("wide").to(dtype), x, **options)
            theirs = one_backward("torch", build("wide").to(dtype), x, **options)
            found[f"{dtype}, {label}"] = differences(ours, theirs)
    return found


def test_memory_formats_and_dtypes_equal_ddp():
    for found in run_ranks(compare_formats, 2):
        assert not {label: names for label, names in found.items() if names}


class Fixed(nn.Module):
    """Its gradients are what they are told to be."""

    def __init__(self, *sizes):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, wanted):
        pairs = zip(self.weights, wanted, strict=True)
        return sum((weight * grad).sum() for weight, grad in pairs)


def compare_non_finite(rank, world):
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([inf, -inf, nan, 3e38, 1.0, inf, inf, -3e38])
    other = torch.tensor([1.0, 2.0, 3.0, 3e38, nan, -inf, inf, 3e38])
    wanted = [special if rank == 0 else other]
    results = []
    for kind in ("fast", "torch"):
        model = wrap(kind, Fixed(8))
        model(wanted).backward()
        results.append(grads(model))
    return results


def test_non_finite_gradients_come_out_as_in_ddp():
    for ours, theirs in run_ranks(compare_non_finite, 2):
        assert not differences(ours, theirs)
        assert ours["weights.0"][3].isfinite(), "scaled before the sum, it cannot overflow"
