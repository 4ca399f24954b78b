"""Top-k by chunks in 2-bit values: beside a twin in plain torch, bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist

from fastsync import ChunkedTopK, FastDDP
from tests.helpers.teams import run_ranks
from tests.wire.reference_codes import chunked_topk
from tests.wire.test_wire import (
    inputs,
    is_the_same_everywhere,
    model,
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


@pytest.mark.slow("3")
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_is_the_sum_of_what_the_twin_keeps_of_each_rank(world):
    for same, most in run_ranks(one_step, world, 0.05):
        assert all(same)
        assert most > 0
