"""The kernels on a GPU beyond what test_ops.py shows: streams, devices, bits of wire formats."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fastsync._build import extension
from fastsync.wire.formats import FORMATS
from tests.helpers.devices import needs_gpu, placed

C = extension.load()
pytestmark = needs_gpu
LONG = 200_000_000  # cycles: about a tenth of a second


def late(value, stream, numel=100_000):
    """A tensor that holds `value` only after `stream` has been busy for a while; -1 until then."""
    tensor = torch.full((numel,), -1.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        tensor.fill_(value)
    return tensor


def test_the_extension_has_cuda_kernels():
    assert C.with_cuda and not C.device_problem("cuda:0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_flags_take_no_launch_of_their_own(dtype, wire):
    sources = [torch.ones(1000, dtype=dtype, device="cuda"), None]
    like = [sources[0], torch.ones(16, device="cuda")]
    flat = torch.zeros(1024, dtype=wire, device="cuda")
    C.pack(sources, like, [0, 1000], flat, 1.0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        C.pack(sources, like, [0, 1000], flat, 1.0)
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() or () if "transfer_kernel" in event.name]
    assert len(kernels) == 1


def test_pack_runs_on_the_current_stream():
    stream = torch.cuda.Stream()
    source = late(3.0, stream)
    flat = torch.zeros_like(source)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        C.pack([source], [source], [0], flat, 0.5)
    stream.synchronize()
    assert flat.eq(1.5).all()


def test_pack_waits_for_no_other_stream():
    """The default stream is busy, and the one that packs is not behind it."""
    stream, source = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    flat = torch.zeros_like(source)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    with torch.cuda.stream(stream):
        C.pack([source], [source], [0], flat, 2.0)
    stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the default stream was too quick for this test"
    with torch.cuda.stream(stream):
        assert flat.eq(2.0).all()


def test_unpack_runs_on_the_current_stream():
    stream = torch.cuda.Stream()
    flat = late(2.0, stream)
    target = torch.zeros_like(flat)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        C.unpack([target], [0], flat, 1.0, True)
    stream.synchronize()
    assert target.eq(2.0).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_the_tensors_are():
    source = torch.arange(5000.0, device="cuda:1")
    flat = torch.zeros_like(source)
    with torch.cuda.device(0):
        C.pack([source], [source], [0], flat, 0.5)
    assert torch.equal(flat, source * 0.5)


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match="on cuda:0 but got one on cpu"):
        C.pack([torch.ones(4)], [torch.ones(4)], [0], torch.ones(8, device="cuda"), 1.0)


def test_random_sizes_and_places():
    generator = torch.Generator().manual_seed(5)

    def below(n):
        return int(torch.randint(n, (), generator=generator))

    for _ in range(60):
        tensors, offsets, end = [], [], below(9)
        for _ in range(1 + below(40)):
            numel, shift = below(3) * below(20_000) + below(70), below(9)
            tensors.append(torch.randn(numel + shift, generator=generator)[shift:])
            offsets.append(end)
            end += numel + below(9)
        flat = torch.zeros(end, dtype=(torch.float32, torch.bfloat16, torch.float16)[below(3)])
        on_gpu = placed(flat, "cuda")
        moved = [placed(t, "cuda") for t in tensors]
        C.pack(tensors, tensors, offsets, flat, 1 / 3)
        C.pack(moved, moved, offsets, on_gpu, 1 / 3)
        assert torch.equal(on_gpu.cpu(), flat)


def odd_values(numel, special):
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    values *= torch.logspace(-20, 20, numel) if numel > 300 else 1.0
    if special and numel > 3:
        values[:: max(numel // 3, 1)] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])[
            : len(values[:: max(numel // 3, 1)])
        ]
    return values


@pytest.mark.slow(but=("fp16-False-False",))
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_averages_have_the_bits_of_the_cpu(format, gather, special):
    """Encoding, the sum and decoding; every length of a tail."""
    for numel in (1, 2, 7, 8, 9, 63, 255, 256, 257, 4095, 70_001):
        tensors = [odd_values(numel, special), odd_values(numel, False).flip(0), torch.ones(numel)]
        expected = C.wire_average(tensors, format, gather)
        found = C.wire_average([t.cuda() for t in tensors], format, gather).cpu()
        assert torch.equal(found.isnan(), expected.isnan()), numel
        assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5)), numel


@pytest.mark.slow(but=("int4-dtype2",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_misaligned_tensors_are_coded_as_on_the_cpu(format, dtype):
    block, generator = FORMATS[format].block, torch.Generator().manual_seed(2)
    tensors, offsets, end = [], [], 0
    for index, numel in enumerate((1, block, block + 1, 1000, 5 * block - 1, 33_333)):
        shift = index % 4
        tensors.append(torch.randn(numel + shift, generator=generator).to(dtype)[shift:])
        offsets.append(end)
        end += -(-numel // block) * block
    nbytes = -(-FORMATS[format].coded_bytes(end) // 16) * 16
    results = []
    for device in ("cpu", "cuda"):
        mine = [placed(t, device) for t in tensors]
        wire = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        C.encode(mine, offsets, wire, (format, end), 1 / 3)
        target = [torch.zeros_like(t) for t in mine]
        C.decode(target, offsets, wire, (format, end))
        results.append([t.cpu() for t in (wire, *target)])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)
