"""Codecs as tasks: encode, reduce and decode by format, and top-k's selection, beside torch's own
operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.measure.transfers import SCALE, SEED, Scattered, Task, Way, shapes_of
from examples.common.training import Workload
from examples.common.variants import OURS
from fastsync._build import extension
from fastsync.reducer.bucket_layout import slot_layout
from fastsync.wire.formats import FORMATS, Format, TopK

ENCODE, REDUCE, DECODE, SELECT = "encode", "reduce", "decode", "select"
TORCH = "torch"
SOURCES = 2  # ranks whose chunks are summed

# Largest error of a code, as a share of the block's largest magnitude; see csrc/kernels/codec.h.
BOUNDS = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}
BOUNDS |= {"int8": 1 / 252, "int4": 1 / 13.8}
# torch's way rounds the step of integers to bfloat16 downwards too, and then clamps.
SLACK = {OURS: 1.0001, TORCH: 1.6}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
LARGEST = {"int8": 127, "int4": 7}

Code = tuple[Tensor, ...]  # codes, then scales of blocks where the format has them


def torch_encode(format: Format, flat: Tensor) -> Code:
    """Return the code of `flat`, fp32 [whole blocks], in torch's own operations."""
    if format.scale_bytes == 0:
        return (flat.to(DTYPES[format.name], copy=True),)
    blocks = flat.view(-1, format.block)
    peaks = blocks.abs().amax(1, keepdim=True)
    if format.name in DTYPES:
        dtype = DTYPES[format.name]
        exponents = torch.frexp(peaks / torch.finfo(dtype).max).exponent
        return torch.ldexp(blocks, -exponents).to(dtype), exponents.to(torch.int8)
    largest = LARGEST[format.name]
    steps = (peaks / largest).to(torch.bfloat16)
    codes = (blocks / steps).round_().clamp_(-largest, largest).to(torch.int8)
    if format.bits == 4:
        codes = codes[:, 0::2].bitwise_and(15).bitwise_or_(codes[:, 1::2] << 4)
    return codes, steps


def torch_decode(format: Format, code: Code) -> Tensor:
    """Decode a code, fp32, flat, in torch's own operations."""
    codes = code[0]
    if format.scale_bytes == 0:
        return codes.float()
    if format.name in DTYPES:
        return torch.ldexp(codes.float(), code[1].int()).view(-1)
    if format.bits == 4:
        codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=2).flatten(1)
    return (codes * code[1].float()).view(-1)


@dataclass(frozen=True)
class CodecCase:
    """One kernel of one format."""

    kind: str
    wire: str

    @property
    def name(self) -> str:
        """Return the name on the command line, for example "encode int8"."""
        return f"{self.kind} {self.wire}"

    def task(self, workload: Workload, device: torch.device) -> Task:
        """Return the case with random gradients of the workload's shapes."""
        generator = torch.Generator(device).manual_seed(SEED)
        shapes = shapes_of(workload)
        gradients = [torch.randn(*s, generator=generator, device=device) for s in shapes]
        if self.kind == SELECT:
            return _selection(torch.cat([g.view(-1) for g in gradients]))
        make = {ENCODE: _encoding, REDUCE: _reduction, DECODE: _decoding}[self.kind]
        return make(CodecData(gradients, FORMATS[self.wire]))


CODEC_CASES = (
    *(CodecCase(kind, wire) for wire in FORMATS for kind in (ENCODE, REDUCE, DECODE)),
    CodecCase(SELECT, "topk"),
)


class CodecData(Scattered):
    """Gradients in the layout of a format, and a buffer for the code of each source."""

    def __init__(self, gradients: list[Tensor], format: Format) -> None:
        layout = slot_layout([g.numel() for g in gradients], format.block)
        flat = torch.zeros(layout.numel, device=gradients[0].device)
        super().__init__(gradients, flat, list(layout.offsets))
        self.format, self.plan = format, (format.name, layout.numel)
        self.coded_bytes = format.coded_bytes(layout.numel)
        self.moved = sum(g.nbytes for g in gradients) + self.coded_bytes  # with their code
        nbytes = -(-self.coded_bytes // 16) * 16
        self.wires = [flat.new_zeros(nbytes, dtype=torch.uint8) for _ in range(SOURCES)]

    def gathered(self) -> Tensor:
        """Return the gradients times SCALE, in the flat buffer, by torch."""
        torch._foreach_copy_(self.views(self.flat), self.gradients)
        return self.flat.mul_(SCALE)

    def encode(self, wire: Tensor) -> None:
        """Encode by fastsync's kernel."""
        extension.load().encode(self.gradients, self.offsets, wire, self.plan, SCALE)

    def decoded(self, wire: Tensor) -> Tensor:
        """Decode a wire buffer, flat, by fastsync's kernel."""
        flat = torch.zeros_like(self.flat)
        extension.load().decode([flat], [0], wire, self.plan)
        return flat

    def task(
        self,
        moved: int,
        ways: tuple[Way, Way],
        targets: list[Tensor],
        read: Callable[[], Tensor],
        *wanted: Tensor,
    ) -> Task:
        """Return a task whose results may be off by one rounding of the format.

        Args:
            ways: ours, then torch's; one that returns a code is judged by what that stands for.
            read: what the targets stand for, flat.
            wanted: what the targets, and then what a returned code must stand for.
        """

        def judged(name: str, code: Any) -> tuple[Tensor, Tensor, Tensor]:
            found = read() if code is None else torch_decode(self.format, code)
            exact = wanted[code is not None].double()
            peaks = exact.abs().view(-1, self.format.block).amax(1)
            limit = peaks * BOUNDS[self.format.name] * SLACK[name]
            return found, exact, limit.repeat_interleave(self.format.block)

        named = dict(zip((OURS, TORCH), ways, strict=True))
        return Task(self.format.name, moved, named, targets, judged)


def _encoding(data: CodecData) -> Task:
    wire, wanted = data.wires[0], data.gathered().clone()
    ways = (lambda: data.encode(wire), lambda: torch_encode(data.format, data.gathered()))
    return data.task(data.moved, ways, [wire], lambda: data.decoded(wire), wanted, wanted)


def _reduction(data: CodecData) -> Task:
    for wire in data.wires:
        data.encode(wire)
        torch._foreach_neg_(data.gradients[::2])
    ext, format = extension.load(), data.format
    received, result = torch.cat(data.wires), torch.zeros_like(data.wires[0])
    decoded = [data.decoded(wire) for wire in data.wires]
    codes = [torch_encode(format, flat) for flat in decoded]

    def torch_sum() -> Tensor:
        one, other = (torch_decode(format, code) for code in codes)
        return one + other

    ways = (
        lambda: ext.reduce(received, result, data.plan),
        lambda: torch_encode(format, torch_sum()),
    )
    moved, read = (SOURCES + 1) * data.coded_bytes, lambda: data.decoded(result)
    return data.task(moved, ways, [result], read, decoded[0] + decoded[1], torch_sum())


def _decoding(data: CodecData) -> Task:
    ext, wire = extension.load(), data.wires[0]
    data.encode(wire)
    code = torch_encode(data.format, data.gathered())
    targets, found = [torch.empty_like(g) for g in data.gradients], torch.zeros_like(data.flat)
    views = data.views(found)

    def by_torch() -> None:
        torch._foreach_copy_(targets, data.views(torch_decode(data.format, code)))

    def read() -> Tensor:
        torch._foreach_copy_(views, targets)
        return found

    ways = (lambda: ext.decode(targets, data.offsets, wire, data.plan), by_torch)
    return data.task(data.moved, ways, targets, read, data.flat.clone())


def _selection(flat: Tensor) -> Task:
    count, sizes, ext = TopK().kept(flat.numel()), flat.abs(), extension.load()
    positions = torch.zeros(count, dtype=torch.int32, device=flat.device)
    wanted = sizes.sort(descending=True).values
    wanted[count:] = 0

    def by_torch() -> None:
        positions.copy_(flat.abs().topk(count, sorted=False).indices)

    def judged(name: str, result: object) -> tuple[Tensor, Tensor, float]:
        chosen = torch.zeros_like(sizes).index_copy_(0, positions.long(), sizes[positions.long()])
        return chosen.sort(descending=True).values, wanted, 0.0

    ways: dict[str, Way] = {OURS: lambda: ext.select_largest(flat, positions), TORCH: by_torch}
    return Task(SELECT, flat.nbytes + positions.nbytes, ways, [positions], judged)
