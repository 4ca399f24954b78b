"""Top-k by chunks in 2-bit values: beside a twin in plain torch, bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist

from fastsync import ChunkedTopK, FastDDP, Wire
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import chunked_topk
from tests.wire.test_wire import (
    constant_gradients,
    inputs,
    is_the_same_everywhere,
    model,
    poisoned,
    residual_mass,
)

BLOCK = ChunkedTopK.block


def arrived(codec, values):
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    payload = torch.full((codec.coded_bytes(padded.numel()),), 0xAB, dtype=torch.uint8)
    codec.encode(padded, payload)
    result = torch.full_like(padded, math.nan)
    codec.decode(payload, result)
    return result[: values.numel()]


def adversarial(numel):
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    yield from (normal, torch.zeros(numel), torch.full((numel,), -2.0), normal * 1e-42)
    yield torch.randint(-4, 5, (numel,), generator=generator) / 4  # magnitudes between codes
    yield normal * 10 ** torch.linspace(-38, 38, numel)
    yield normal * (torch.rand(numel, generator=generator) < 0.001)  # fewer than are kept
    alone = normal.clone()
    alone[numel // 2] = 1e6
    yield alone


@pytest.mark.slow(but=("9000",))
@pytest.mark.parametrize("numel", [1, 10, 4096, 4097, 9000])
def test_values_are_those_of_the_twin(numel):
    for density in (1e-9, 1 / 64, 0.3, 1.0):
        codec = ChunkedTopK(density)
        for values in adversarial(numel):
            found, wanted = arrived(codec, values), chunked_topk(values, codec.kept)
            assert torch.equal(found, wanted), (density, (found - wanted).abs().max())


def test_a_chunk_is_a_scale_and_14_bits_for_each_element():
    codec = ChunkedTopK(1 / 64)
    assert codec.kept == 64
    assert codec.coded_bytes(3 * BLOCK) == 3 * (4 + 64 * 14 // 8)


def test_infinities_arrive_alone_and_a_nan_with_what_its_chunk_sends():
    values = torch.randn(2 * BLOCK)
    values[7], values[9] = math.inf, -math.inf
    found = arrived(ChunkedTopK(), values)
    assert found[:BLOCK].nonzero().flatten().tolist() == [7, 9]
    assert torch.equal(found[[7, 9]], values[[7, 9]])
    assert torch.equal(found[BLOCK:], arrived(ChunkedTopK(), values[BLOCK:]))
    values[100] = math.nan
    found = arrived(ChunkedTopK(), values)
    assert found.isnan().sum() == ChunkedTopK().kept
    assert found[100].isnan()


def one_step(rank, world, density):
    """Return the averages of a step, and those of plain torch."""
    wrapped = FastDDP(model(), wire=ChunkedTopK(density))
    wrapped(inputs(0, rank)).square().mean().backward()
    found = [p.grad for p in wrapped.parameters()]
    assert is_the_same_everywhere(torch.cat([g.flatten() for g in found]))
    plain = model()
    plain(inputs(0, rank)).square().mean().backward()
    wanted = []
    for param in plain.parameters():
        mine = chunked_topk(param.grad * (1 / world), ChunkedTopK(density).kept)
        rows = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(rows, mine)
        wanted.append(sum(rows[1:], rows[0]))
    return list(map(torch.equal, found, wanted)), max(g.count_nonzero().item() for g in found)


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_is_the_sum_of_what_the_twin_keeps_of_each_rank(world):
    for same, most in run_ranks(one_step, world, 0.05):
        assert all(same)
        assert most > 0


def test_error_feedback_is_on_and_lets_nothing_be_lost():
    off = [
        run_ranks(constant_gradients, 2, Wire(ChunkedTopK(0.3), error_feedback=feedback), 12)[0]
        for feedback in (False, None)
    ]
    assert off[1] < off[0] / 3


@pytest.mark.slow(but=("auto",))
@pytest.mark.parametrize("form", ["auto", "two_shot"])
def test_the_residuals_are_what_the_averages_lack(form):
    for off, _ in run_ranks(residual_mass, 3, Wire(ChunkedTopK(0.1), form)):
        assert off < 1e-4


@pytest.mark.slow(but=("nan",))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_as_such_and_is_gone_in_the_next_step(value):
    for result in run_ranks(poisoned, 2, ChunkedTopK(), value):
        assert result == [(False, False), (True, True), (True, True), (True, True)]


def mismatched(rank, world):
    words = r"(?s)chunked_topk\(density=0.2\).*chunked_topk\(density=0.1\)"
    with pytest.raises(RuntimeError, match=words):
        FastDDP(model(), wire=ChunkedTopK(0.1 * (rank + 1)))


def test_ranks_with_other_densities_are_told():
    run_ranks(mismatched, 2)


@pytest.mark.slow(but=("1.01",))
@pytest.mark.parametrize("density", [0, -0.1, 1.01, math.nan])
def test_density_is_checked(density):
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        ChunkedTopK(density)
