"""Errors of averages against fp64, and the bounds that the formats state."""

import pytest
import torch

from bench.commands import accuracy
from examples.common.ranks import CheckFailed
from fastsync.build import extension
from fastsync.testing import run_ranks
from fastsync.wire.formats import FORMATS

NUMEL = 5000
WORLDS = (2, 8, 64)


@pytest.mark.parametrize("name", accuracy.UNIT)
@pytest.mark.parametrize("world", WORLDS)
def test_one_rounding_of_each_input_and_one_of_the_result(name, world):
    tensors = accuracy.gradients(world, NUMEL)
    bound = accuracy.one_rounding_each(tensors, accuracy.UNIT[name])
    exact = accuracy.exact_average(tensors)
    for gather in (False, True):
        error = (accuracy.coded_average(tensors, name, gather) - exact).abs()
        assert (error <= bound).all()
    native = (accuracy.native_average(tensors, accuracy.DTYPES[name]) - exact).abs()
    assert (native <= bound).all() == (world == 2)  # the bound tells the two apart


@pytest.mark.parametrize("name", accuracy.UNIT)
def test_the_error_grows_with_the_number_of_ranks_in_a_native_sum_only(name):
    """In the two-shot form inputs' errors average out, and one rounding of the result stays."""
    grown = accuracy.growth(WORLDS, NUMEL)

    def errors(way):
        return [error for _, error, _ in grown[f"{name}, {way}"]]

    coded, native = errors("two-shot"), errors("native sum")
    assert max(coded) == coded[0]
    assert min(coded) > 0.6 * coded[0]
    assert native[-1] > 2 * native[0]
    assert coded[-1] < native[-1] / 2


@pytest.mark.parametrize("name", accuracy.BOUNDS)
@pytest.mark.parametrize("kind", accuracy.hostile(1))
def test_block_bounds_hold_on_hostile_numbers(name, kind):
    make = accuracy.hostile(NUMEL)[kind]
    for world in (1, 4):
        tensors = [make(rank) for rank in range(world)]
        error = accuracy.coded_average(tensors, name) - accuracy.exact_average(tensors)
        assert (error.abs() <= accuracy.two_shot_bound(tensors, name)).all()


@pytest.mark.parametrize("name", accuracy.BOUNDS)
def test_the_bounds_are_near_what_is_reached(name):
    """One code of noise alone comes within a factor of two of its bound."""
    tensors = [accuracy.hostile(1 << 16)["normal"](0)]
    error = accuracy.coded_average(tensors, name, gather=True) - tensors[0].double()
    share = (error.abs() / accuracy.block_bound(tensors[0].double(), name)).max()
    assert 0.5 < share <= 1


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_emulated_sum_is_gloo_s_on_two_ranks(name):
    emulated = accuracy.native_average(accuracy.gradients(2, NUMEL), accuracy.DTYPES[name])
    for real in run_ranks(accuracy.gloo_average, 2, NUMEL, name):
        assert torch.equal(real, emulated)


def test_a_bound_that_does_not_hold_ends_the_command():
    with pytest.raises(CheckFailed, match=r"int8, outliers: an error is 1\.50"):
        accuracy.check_bounds({}, {"int8": {"normal": 0.5, "outliers": 1.5}})
    with pytest.raises(CheckFailed, match="fp16, two-shot"):
        accuracy.check_bounds({"fp16, two-shot": [(2, 1.0, 1.1)]}, {})
    with pytest.raises(CheckFailed, match="nan"):
        accuracy.check_bounds({}, {"int8": {"normal": float("nan")}})
    accuracy.check_bounds({"fp16, native sum": [(64, 1.0, 9.0)]}, {"int8": {"normal": 1.0}})


def average_on_a_rank(rank, world, name, form):
    import fastsync

    model = torch.nn.Linear(NUMEL, 1, bias=False)
    wire = fastsync.Wire(name, form=form, error_feedback=False)
    wrapped = fastsync.FastDDP(model, wire=wire)
    wrapped(accuracy.gradients(world, NUMEL)[rank][None]).sum().backward()
    return model.weight.grad[0]


@pytest.mark.parametrize("form", ["two_shot", "gather"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_simulated_is_what_ranks_get(name, form):
    simulated = extension.load().wire_average(accuracy.gradients(3, NUMEL), name, form == "gather")
    for real in run_ranks(average_on_a_rank, 3, name, form):
        assert torch.equal(real, simulated)
