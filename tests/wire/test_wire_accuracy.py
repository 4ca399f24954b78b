"""Errors of averages against fp64, and the bounds that the formats state."""

import pytest
import torch
import torch.distributed as dist

from bench.commands import accuracy
from examples.common.ranks import CheckFailed
from fastsync._build import extension
from fastsync.wire.formats import FORMATS
from tests.fuzz.random_cases.wires import BLOCK_BOUNDS
from tests.helpers.teams import run_ranks

NUMEL = 5000
WORLDS = (2, 8, 64)

SMALLEST = 2.0**-127


def block_bound(values, name):
    """The largest error of coding fp64 `values` in a block-scaled format, element by element."""
    block = FORMATS[name].block
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % block)).view(-1, block)
    relative, of_largest = BLOCK_BOUNDS[name]
    bound = torch.maximum(padded * relative, padded.amax(1, keepdim=True) * of_largest)
    return bound.clamp_min(SMALLEST).flatten()[: len(values)]


def two_shot_bound(tensors, name):
    """The largest error of an average: that of each input's code, and of the average's own.

    The sum itself is fp32, a rounding for each of its additions, and so is the decoded number.
    """
    world = len(tensors)
    scaled = [t.double() / world for t in tensors]
    inputs = torch.stack([block_bound(s, name) for s in scaled]).sum(0)
    sums = accuracy.exact_average(tensors).abs() + inputs
    in_fp32 = torch.stack([s.abs() for s in scaled]).sum(0) * (world + 1) * 2.0**-24
    return inputs + block_bound(sums, name) + in_fp32 + SMALLEST


def hostile(numel):
    """Numbers that a shared scale suits badly, by rank."""

    def noise(rank):
        return torch.randn(numel, generator=torch.Generator().manual_seed(accuracy.SEED + rank))

    def outliers(rank):
        values = noise(rank)
        values[:: 97 + rank] *= 1e4
        return values

    def mixed(rank):
        powers = torch.arange(numel) * 7 % 61 - 30
        return noise(rank) * 2.0**powers

    return {
        "normal": noise,
        "outliers": outliers,
        "mixed magnitudes": mixed,
        "constant": lambda rank: torch.full((numel,), 0.1 * (rank + 1)),
        "denormal": lambda rank: noise(rank) * 1e-39,
        "near fp32's limit": lambda rank: noise(rank).clamp(-1, 1) * 1e38,
        "one in a block": lambda rank: torch.where(
            torch.arange(numel) % 256 == rank, noise(rank), torch.zeros(())
        ),
    }


def gloo_average(rank, world, numel, name):
    """The same by Gloo, on a real rank."""
    mine = (accuracy.gradients(world, numel)[rank] / world).to(accuracy.DTYPES[name])
    dist.all_reduce(mine)
    return mine.double()


@pytest.mark.slow("8-fp16", "64-fp16", "64-bf16")
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


@pytest.mark.slow("bf16")
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


@pytest.mark.parametrize("name", BLOCK_BOUNDS)
@pytest.mark.parametrize("kind", hostile(1))
def test_block_bounds_hold_on_hostile_numbers(name, kind):
    make = hostile(NUMEL)[kind]
    for world in (1, 4):
        tensors = [make(rank) for rank in range(world)]
        error = accuracy.coded_average(tensors, name) - accuracy.exact_average(tensors)
        assert (error.abs() <= two_shot_bound(tensors, name)).all()


@pytest.mark.parametrize("name", BLOCK_BOUNDS)
def test_the_bounds_are_near_what_is_reached(name):
    """One code of noise alone comes within a factor of two of its bound."""
    tensors = [hostile(1 << 16)["normal"](0)]
    error = accuracy.coded_average(tensors, name, gather=True) - tensors[0].double()
    share = (error.abs() / block_bound(tensors[0].double(), name)).max()
    assert 0.5 < share <= 1


@pytest.mark.slow("fp16")
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_emulated_sum_is_gloo_s_on_two_ranks(name):
    emulated = accuracy.native_average(accuracy.gradients(2, NUMEL), accuracy.DTYPES[name])
    for real in run_ranks(gloo_average, 2, NUMEL, name):
        assert torch.equal(real, emulated)


def test_a_bound_that_does_not_hold_ends_the_command():
    with pytest.raises(CheckFailed, match="fp16, two-shot"):
        accuracy.check_bounds({"fp16, two-shot": [(2, 1.0, 1.1)]})
    accuracy.check_bounds({"fp16, native sum": [(64, 1.0, 9.0)]})


def average_on_a_rank(rank, world, name, form):
    import fastsync

    model = torch.nn.Linear(NUMEL, 1, bias=False)
    wire = fastsync.Wire(name, form=form, error_feedback=False)
    wrapped = fastsync.FastDDP(model, wire=wire)
    wrapped(accuracy.gradients(world, NUMEL)[rank][None]).sum().backward()
    return model.weight.grad[0]


@pytest.mark.slow(but=("fp8_e5m2-gather",))
@pytest.mark.parametrize("form", ["two_shot", "gather"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_simulated_is_what_ranks_get(name, form):
    simulated = extension.load().wire_average(accuracy.gradients(3, NUMEL), name, form == "gather")
    for real in run_ranks(average_on_a_rank, 3, name, form):
        assert torch.equal(real, simulated)
