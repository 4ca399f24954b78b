"""What PowerSGD does on a GPU, against the CPU's kernels: vectors, products, random numbers."""

import math

import pytest
import torch

from fastsync.build import extension
from tests.devices import needs_gpu

C = extension.load()
pytestmark = needs_gpu


def vectors_of(count, numel, poisoned):
    torch.manual_seed(count * numel)
    vectors = torch.randn(count, numel)
    if count > 2:
        vectors[1] = 2 * vectors[0]
    if poisoned and count > 3:
        vectors[3, 0] = math.nan
    return vectors


@pytest.mark.parametrize("refilled", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (4, 60), (3, 1024), (4, 50257)])
def test_orthonormal_vectors_are_the_cpus(size, refilled):
    mine = vectors_of(*size, refilled)
    found = mine.cuda()
    refill = torch.randn(size) if refilled else None
    C.orthonormalise(mine, refill)
    C.orthonormalise(found, refill.cuda() if refilled else None)
    assert torch.allclose(found.cpu(), mine, atol=1e-6, equal_nan=True)


def test_orthonormal_vectors_have_the_same_bits_every_time():
    """Ranks make them for themselves."""
    given = vectors_of(4, 50257, False).cuda()
    first = given.clone()
    C.orthonormalise(first)
    for _ in range(20):
        again = given.clone()
        C.orthonormalise(again)
        assert torch.equal(again, first)


def test_random_numbers_are_the_cpus():
    for numel in (1, 1023, 100_001):
        mine, found = torch.empty(numel), torch.empty(numel, device="cuda")
        C.fill_random(mine, 7 << 40)
        C.fill_random(found, 7 << 40)
        assert torch.equal(found.cpu(), mine)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("size", [(4, 768, 3072), (1, 5, 4099), (3, 2001, 33), (40, 96, 96)])
def test_factors_are_those_of_fp64(size, left):
    rank, rows, cols = size
    torch.manual_seed(0)
    matrix = torch.randn(rows, cols, device="cuda")
    factor = torch.randn(rank, cols if left else rows, device="cuda")
    out = torch.full((rank, rows if left else cols), torch.nan, device="cuda")
    C.project(matrix, factor, out, left)
    exact = factor.double() @ (matrix.double().t() if left else matrix.double())
    terms = factor.double().abs() @ (matrix.t() if left else matrix).double().abs()
    assert bool(((out.double() - exact).abs() <= 1e-5 * terms).all())
    again = torch.empty_like(out)
    C.project(matrix, factor, again, left)
    assert torch.equal(again, out)


@pytest.mark.parametrize("kept", [False, True])
def test_products_and_residuals_are_the_cpus(kept):
    torch.manual_seed(0)
    left, right, matrix = torch.randn(3, 70), torch.randn(3, 1100), torch.randn(70, 1100)
    matrix[5, 600] = math.inf
    found = matrix.cuda()
    mine, lost = (torch.full_like(matrix, 7.0) if kept else None for _ in range(2))
    lost = lost.cuda() if kept else None
    C.low_rank_product((left, right), 0.5, matrix, mine)
    C.low_rank_product((left.cuda(), right.cuda()), 0.5, found, lost)
    assert torch.equal(found.cpu(), matrix)
    assert not kept or torch.equal(lost.cpu(), mine)
