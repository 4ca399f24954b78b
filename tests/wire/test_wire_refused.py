"""Backends, models and ranks that cannot carry gradients as bytes: an error everywhere, in time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, RankMismatchError, Wire
from tests.helpers.backends import OverGloo
from tests.helpers.teams import run_ranks


class WithoutAllToAll(OverGloo):
    """A backend of one's own: Gloo, less what it leaves out."""

    called = "lacking"

    def allreduce(self, *args):
        return self._inner.allreduce(*args)

    def broadcast(self, *args):
        return self._inner.broadcast(*args)


def make_lacking(prefix_store, rank, world, timeout):
    inner = dist.ProcessGroupGloo(prefix_store, rank, world, timeout)
    return WithoutAllToAll(rank, world, inner)


def on_a_backend_that_lacks_it(rank, world, wire):
    dist.Backend.register_backend("lacking", make_lacking, devices=["cpu"])
    group = dist.new_group(backend="lacking")
    try:
        model = FastDDP(nn.Linear(4, 3), wire=wire, process_group=group)
        model(torch.ones(1, 4)).sum().backward()
    except (ValueError, RankMismatchError) as error:
        return f"{error} {error.__cause__ or ''}"
    return "works"


@pytest.mark.slow("wire1")
@pytest.mark.parametrize("wire", ["int8", Wire("bf16", form="two_shot")])
def test_a_backend_without_all_to_all(wire):
    for text in run_ranks(on_a_backend_that_lacks_it, 2, wire):
        assert "'lacking' cannot send gradients as bytes" in text
        assert "(all-to-all: " in text
        assert "form='native'" in text


def test_it_is_good_enough_for_what_it_has():
    assert run_ranks(on_a_backend_that_lacks_it, 2, "fp32") == ["works"] * 2


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.phase * self.weight * x).abs()


def wrap_complex(rank, world, wire):
    try:
        model = FastDDP(Complex(), wire=wire)
        model(torch.full((3,), rank + 1.0)).sum().backward()
    except ValueError as error:
        return str(error)
    return model.module.phase.grad


def test_complex_gradients():
    for text in run_ranks(wrap_complex, 2, "int8"):
        assert "'phase' is torch.complex64, which int8 cannot carry" in text
        assert "overrides={'phase': 'fp32'}" in text
    results = run_ranks(wrap_complex, 2, Wire("int8", overrides={"phase": "fp32"}))
    for gradient in results:
        assert torch.allclose(gradient, torch.full((3,), 1.5, dtype=torch.complex64))


WIRES_THAT_DIFFER = {
    "formats": ("int8", "int4", "wire is int4 there but int8 on rank 0"),
    "forms": (Wire("int8", form="gather"), Wire("int8", form="two_shot"), "form=two_shot there"),
    "seeds": (Wire("int8", seed=1), Wire("int8", seed=2), "seed=2 there but int8, seed=1"),
    "overrides": (Wire("int8", overrides={"bias": "fp32"}), "int8", "overrides="),
    "feedback": (Wire("int8", error_feedback=True), "int8", "error_feedback=True on rank 0"),
    "schedules": ("int8", Wire("int8", warmup_steps=3), "warmup_steps=3 there"),
}


def wrap_with(rank, world, wires):
    try:
        FastDDP(nn.Linear(4, 3), wire=wires[rank])
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.slow(but=("forms",))
@pytest.mark.parametrize("label", WIRES_THAT_DIFFER)
def test_wires_that_differ_are_named_on_every_rank(label):
    first, second, text = WIRES_THAT_DIFFER[label]
    for error in run_ranks(wrap_with, 2, [first, second]):
        assert "rank 1 differs from rank 0" in error
        assert text in error
