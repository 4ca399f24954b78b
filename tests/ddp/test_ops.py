"""pack and unpack against their slow twins, to the last bit."""

import itertools
import math
import random

import pytest
import torch

from fastsync._build import extension
from tests.ddp import twins
from tests.helpers.devices import DEVICES, placed

C = extension.load()
REAL = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [*itertools.product(REAL, REAL), (torch.float64, torch.float64)]
COMPLEX = [
    (torch.complex64, torch.float32),
    (torch.complex64, torch.bfloat16),
    (torch.complex128, torch.float64),
]
SCALES = (1.0, 0.5, 1 / 3)


def misaligned(numel, dtype, generator):
    """Contiguous, but at an odd place of its storage."""
    return torch.randn(numel + 3, dtype=dtype, generator=generator)[3:]


def layouts(dtype, generator):
    """Tensors of every kind of memory layout."""

    def randn(*sizes):
        return torch.randn(*sizes, dtype=dtype, generator=generator)

    return {
        "empty": randn(0),
        "scalar": randn(()),
        "one": randn(1),
        "odd": randn(17),
        "large": randn(70001),
        "misaligned": misaligned(1025, dtype, generator),
        "transposed": randn(7, 5).t(),
        "permuted": randn(3, 4, 5).permute(2, 0, 1),
        "channels_last": randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one_by_one_conv": randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
        "strided": randn(9, 8)[:, ::2],
        "sliced": randn(9, 8)[2:7, 1:6],
        "expanded": randn(5, 1).expand(5, 4),
        "empty_matrix": randn(3, 0, 2),
        "wide_range": randn(4097) * torch.logspace(-30, 30, 4097).to(randn(1).real.dtype),
    }


def offsets_for(tensors, gap=1):
    """Slots with a gap between them, most of them misaligned."""
    offsets, end = [], gap
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel() * (2 if tensor.is_complex() else 1) + gap
    return offsets, end


class Checked:
    """pack and unpack on one device, compared with their slow twins on the CPU."""

    def __init__(self, device):
        self.device = device

    def check_pack(self, tensors, like, flat_dtype, scale):
        offsets, numel = offsets_for(like)
        flat = torch.full((numel + 5,), 7.0, dtype=flat_dtype)
        expected = twins.pack(tensors, like, offsets, flat, scale)
        flat, *moved = [placed(t, self.device) for t in (flat, *tensors)]
        C.pack(moved, [placed(t, self.device) for t in like], offsets, flat, scale)
        assert twins.same(flat.cpu(), expected)

    def check_unpack(self, tensors, flat_dtype, scale, accumulate, generator):
        offsets, numel = offsets_for(tensors)
        flat = torch.randn(numel + 5, dtype=flat_dtype, generator=generator)
        before = flat.clone()
        expected = twins.unpack(tensors, offsets, flat, scale, accumulate)
        flat, *tensors = [placed(t, self.device) for t in (flat, *tensors)]
        versions = [t._version for t in tensors]
        C.unpack(tensors, offsets, flat, scale, accumulate)
        for tensor, wanted, version in zip(tensors, expected, versions, strict=True):
            assert twins.same(tensor.cpu(), wanted)
            assert tensor._version > version, "autograd must notice the write"
        assert twins.same(flat.cpu(), before)


@pytest.fixture(params=DEVICES)
def ops(request):
    return Checked(request.param)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.slow(turns="scale")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("tensor_dtype", "flat_dtype"), [*PAIRS, *COMPLEX])
def test_pack_every_layout(tensor_dtype, flat_dtype, scale, generator, threads, ops):
    tensors = list(layouts(tensor_dtype, generator).values())
    ops.check_pack(tensors, tensors, flat_dtype, scale)


@pytest.mark.slow(turns="scale")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("tensor_dtype", "flat_dtype"), [*PAIRS, *COMPLEX])
def test_unpack_every_layout(tensor_dtype, flat_dtype, scale, accumulate, generator, threads, ops):
    tensors = layouts(tensor_dtype, generator)
    del tensors["expanded"]  # several elements share memory: nothing sound to write
    ops.check_unpack(list(tensors.values()), flat_dtype, scale, accumulate, generator)


def test_a_gradient_in_another_order_than_its_slot(generator, ops):
    like = [torch.empty(6, 4), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    tensors = [
        torch.randn(4, 6, generator=generator).t(),
        torch.randn(2, 3, 4, 5, generator=generator),
    ]
    ops.check_pack(tensors, like, torch.float32, 0.25)


@pytest.mark.parametrize("flat_dtype", REAL)
@pytest.mark.parametrize("tensor_dtype", REAL)
def test_special_values(tensor_dtype, flat_dtype, ops):
    info = torch.finfo(tensor_dtype)
    values = [0.0, -0.0, math.nan, math.inf, -math.inf, info.max, -info.max]
    values += [info.tiny, -info.tiny, info.smallest_normal / 2, info.smallest_normal / 64]
    values += [65504.0, 65519.9, 65520.0, 1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-11]
    tensor = torch.tensor(values * 5, dtype=tensor_dtype)
    for scale in (1.0, 0.5, 0.125, 3.0):
        ops.check_pack([tensor], [tensor], flat_dtype, scale)
    flat = torch.tensor(values * 5, dtype=flat_dtype)
    for scale, accumulate in itertools.product((1.0, 0.5), (False, True)):
        target = torch.linspace(-2, 2, len(flat)).to(tensor_dtype)
        expected = twins.unpack([target], [0], flat, scale, accumulate)
        moved = placed(target, ops.device)
        C.unpack([moved], [0], placed(flat, ops.device), scale, accumulate)
        target = moved.cpu()
        assert twins.same(target, expected[0])
        assert torch.equal(
            target.signbit()[~target.isnan()], expected[0].signbit()[~target.isnan()]
        )


def test_every_half_and_bfloat16_survives(ops):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for narrow, wide in itertools.product((torch.float16, torch.bfloat16), REAL):
        values = bits.view(narrow)
        ops.check_pack([values], [values], wide, 1.0)
        ops.check_pack([values], [values], wide, 1 / 3)


def test_product_and_sum_are_rounded_separately(generator, ops):
    """A fused multiply-add would make machines with different instruction sets disagree."""
    for dtype in (torch.float32, torch.float64):
        old, flat = (torch.randn(5000, dtype=dtype, generator=generator) for _ in range(2))
        wanted = old + flat * torch.tensor(1 / 3, dtype=dtype)
        old, flat = (placed(t, ops.device) for t in (old, flat))
        C.unpack([old], [0], flat, 1 / 3, True)
        assert torch.equal(old.cpu(), wanted)


def lazily(kind, generator):
    """A tensor whose memory does not hold what it shows: conjugated, or negated."""
    if kind == "conjugated":
        return torch.randn(33, dtype=torch.complex64, generator=generator).conj()
    return torch._neg_view(torch.randn(33, generator=generator))


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_lazy_conjugation_and_negation(kind, generator, ops):
    tensor = lazily(kind, generator)
    assert tensor.is_conj() or tensor.is_neg()
    ops.check_pack([tensor], [tensor], torch.float32, 0.5)
    for accumulate in (False, True):
        ops.check_unpack([lazily(kind, generator)], torch.float32, 0.5, accumulate, generator)


def test_many_tensors_of_mixed_dtypes(generator, threads, ops):
    rng = random.Random(3)
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    tensors = [
        torch.randn(rng.choice((0, 1, 2, 31, 64, 257)), dtype=rng.choice(dtypes))
        for _ in range(1700)
    ]
    ops.check_pack(tensors, tensors, torch.float32, 0.5)
    ops.check_pack(tensors, tensors, torch.float16, 0.5)
    ops.check_unpack(tensors, torch.float32, 0.5, True, generator)


def test_undefined_tensors_leave_zeros(generator, ops):
    like = [torch.empty(5), torch.empty(0), torch.empty(3, 7), torch.empty(4, dtype=torch.cfloat)]
    ops.check_pack([None] * 4, like, torch.float16, 0.5)
    ops.check_pack([None, None, torch.randn(3, 7), None], like, torch.float32, 0.5)


def test_scaling_in_place(generator, ops):
    flat = torch.randn(100, generator=generator)
    wanted = flat.clone()
    wanted[10:60] *= 0.25
    flat = placed(flat, ops.device)
    view = flat[10:60]
    C.pack([view], [view], [10], flat, 0.25)
    assert torch.equal(flat.cpu(), wanted)


def test_nothing_to_do(ops):
    flat = torch.ones(4, device=ops.device)
    C.pack([], [], [], flat, 0.5)
    C.unpack([], [], flat, 0.5, False)
    assert torch.equal(flat.cpu(), torch.ones(4))


@pytest.mark.parametrize(
    ("tensor", "like", "offset", "flat", "text"),
    [
        (torch.ones(4, dtype=torch.int32), None, 0, torch.ones(8), "dtype Int"),
        (torch.ones(4), None, 0, torch.ones(8, dtype=torch.int64), "dtype Long"),
        (torch.ones(4, dtype=torch.float64), None, 0, torch.ones(8), "fp64|float64"),
        (torch.ones(4), None, 0, torch.ones(8, dtype=torch.float64), "fp64|float64"),
        (torch.ones(4, device="meta"), None, 0, torch.ones(8), "on cpu but got one on meta"),
        (torch.ones(4), None, 0, torch.ones(8, device="meta"), "no kernels for meta"),
        (torch.ones(2, 2), torch.ones(4), 0, torch.ones(8), r"sizes \[4\] but got \[2, 2\]"),
        (torch.ones(4), None, 5, torch.ones(8), "4 elements at offset 5 does not fit"),
        (torch.ones(4), None, -1, torch.ones(8), "offset -1 does not fit"),
        (torch.ones(3, dtype=torch.cfloat), None, 3, torch.ones(8), "6 elements at offset 3"),
        (torch.ones(4), None, 0, torch.ones(8, 1), "one-dimensional flat buffer"),
        (torch.ones(4), None, 0, torch.ones(16)[::2], "contiguous"),
        (torch.ones(4).to_sparse(), torch.ones(4), 0, torch.ones(8), "dense tensors"),
    ],
)
def test_wrong_arguments(tensor, like, offset, flat, text):
    with pytest.raises(ValueError, match=text):
        C.pack([tensor], [tensor if like is None else like], [offset], flat, 1.0)
    if like is None:
        with pytest.raises(ValueError, match=text):
            C.unpack([tensor], [offset], flat, 1.0, False)


def test_lists_of_different_lengths():
    with pytest.raises(ValueError, match="as many tensors as layouts and offsets"):
        C.pack([torch.ones(2)], [], [0], torch.ones(4), 1.0)
    with pytest.raises(ValueError, match="as many tensors as layouts and offsets"):
        C.unpack([torch.ones(2)], [], torch.ones(4), 1.0, False)
