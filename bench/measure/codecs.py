"""Codecs as tasks: encode, reduce and decode by format, and top-k's selection, beside torch's own
operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.measure.transfers import SCALE, SEED, Task, Way, shapes_of
from examples.common.ranks import CheckFailed
from examples.common.training import Workload
from examples.common.variants import OURS
from fastsync.build import extension
from fastsync.plan.layout import FlatLayout, slot_layout
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
    """The code of `flat`, fp32 [whole blocks], in torch's own operations."""
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
    """What a code stands for, fp32, flat."""
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
        """As on the command line, for example "encode int8"."""
        return f"{self.kind} {self.wire}"

    def task(self, workload: Workload, device: torch.device) -> Task:
        """The case with random gradients of the workload's shapes."""
        generator = torch.Generator(device).manual_seed(SEED)
        shapes = shapes_of(workload)
        gradients = [torch.randn(*s, generator=generator, device=device) for s in shapes]
        if self.kind == SELECT:
            return _selection(torch.cat([g.view(-1) for g in gradients]))
        make = {ENCODE: _encoding, REDUCE: _reduction, DECODE: _decoding}[self.kind]
        return make(CodecData.of(gradients, FORMATS[self.wire]))


CODEC_CASES = (
    *(CodecCase(kind, wire) for wire in FORMATS for kind in (ENCODE, REDUCE, DECODE)),
    CodecCase(SELECT, "topk"),
)


@dataclass
class CodecData:
    """Gradients, where they lie in a flat buffer, and a buffer for the code of each source."""

    format: Format
    gradients: list[Tensor]
    layout: FlatLayout
    flat: Tensor
    wires: list[Tensor]

    @classmethod
    def of(cls, gradients: list[Tensor], format: Format) -> CodecData:
        layout = slot_layout([g.numel() for g in gradients], format.block)
        flat = torch.zeros(layout.numel, device=gradients[0].device)
        nbytes = -(-format.coded_bytes(layout.numel) // 16) * 16
        wires = [flat.new_zeros(nbytes, dtype=torch.uint8) for _ in range(SOURCES)]
        return cls(format, gradients, layout, flat, wires)

    def __post_init__(self) -> None:
        self.plan = self.format.name, self.layout.numel
        self.coded_bytes = self.format.coded_bytes(self.layout.numel)
        self.moved = sum(g.nbytes for g in self.gradients) + self.coded_bytes  # with their code

    def views(self, flat: Tensor) -> list[Tensor]:
        places = zip(self.layout.offsets, self.gradients, strict=True)
        return [flat[offset : offset + g.numel()].view(g.shape) for offset, g in places]

    def gathered(self) -> Tensor:
        """Gradients times SCALE, in the flat buffer, by torch."""
        torch._foreach_copy_(self.views(self.flat), self.gradients)
        return self.flat.mul_(SCALE)

    def encode(self, wire: Tensor) -> None:
        """By fastsync's kernel."""
        extension.load().encode(self.gradients, list(self.layout.offsets), wire, self.plan, SCALE)

    def decoded(self, wire: Tensor) -> Tensor:
        """What a wire stands for, flat, by fastsync's kernel."""
        flat = torch.zeros_like(self.flat)
        extension.load().decode([flat], [0], wire, self.plan)
        return flat

    def expect(self, name: str, found: Tensor, wanted: Tensor) -> None:
        """Raises CheckFailed where an element is off by more than one rounding of the format."""
        shape = (-1, self.format.block)
        error = (found.double() - wanted.double()).abs().view(shape)
        limit = wanted.double().abs().view(shape).amax(1, keepdim=True)
        if not bool((error <= limit * BOUNDS[self.format.name] * SLACK[name]).all()):
            raise CheckFailed(f"{self.format.name} by {name}: an error beyond one rounding")

    def coding(self, target: Tensor, ours: Way, theirs: Callable[[], Code], *sums: Tensor) -> Task:
        """A task whose result is a code: ours in `target`, torch's as it returns it.

        Args:
            sums: what ours, and then what torch's must stand for.
        """

        def check(name: str, way: Way) -> None:
            target.fill_(255)
            code: Any = way()
            found = self.decoded(target) if code is None else torch_decode(self.format, code)
            self.expect(name, found, sums[code is not None])

        return Task(self.moved, {OURS: ours, TORCH: theirs}, check)


def _encoding(data: CodecData) -> Task:
    wanted = data.gathered().clone()
    return data.coding(
        data.wires[0],
        lambda: data.encode(data.wires[0]),
        lambda: torch_encode(data.format, data.gathered()),
        *(wanted, wanted),
    )


def _reduction(data: CodecData) -> Task:
    for wire in data.wires:
        data.encode(wire)
        torch._foreach_neg_(data.gradients[::2])
    ext, format = extension.load(), data.format
    received, result = torch.cat(data.wires), torch.zeros_like(data.wires[0])
    decoded = [data.decoded(wire) for wire in data.wires]
    codes = [torch_encode(format, flat) for flat in decoded]
    theirs = [torch_decode(format, code) for code in codes]

    def by_torch() -> Code:
        one, other = (torch_decode(format, code) for code in codes)
        return torch_encode(format, one + other)

    sums = [a + b for a, b in (decoded, theirs)]
    task = data.coding(result, lambda: ext.reduce(received, result, data.plan), by_torch, *sums)
    return Task((SOURCES + 1) * data.coded_bytes, task.ways, task.check)


def _decoding(data: CodecData) -> Task:
    ext, offsets = extension.load(), list(data.layout.offsets)
    data.encode(data.wires[0])
    code = torch_encode(data.format, data.gathered())
    wanted = data.flat.clone()
    targets = [torch.empty_like(g) for g in data.gradients]

    def by_torch() -> None:
        torch._foreach_copy_(targets, data.views(torch_decode(data.format, code)))

    def check(name: str, way: Way) -> None:
        for target in targets:
            target.fill_(math.nan)
        way()
        found = torch.zeros_like(data.flat)
        torch._foreach_copy_(data.views(found), targets)
        data.expect(name, found, wanted)

    ways: dict[str, Way] = {
        OURS: lambda: ext.decode(targets, offsets, data.wires[0], data.plan),
        TORCH: by_torch,
    }
    return Task(data.moved, ways, check)


def _selection(flat: Tensor) -> Task:
    count = TopK().kept(flat.numel())
    positions = torch.zeros(count, dtype=torch.int32, device=flat.device)
    ext = extension.load()

    def by_torch() -> None:
        positions.copy_(flat.abs().topk(count, sorted=False).indices)

    wanted = flat.abs().sort(descending=True).values[:count]

    def check(name: str, way: Way) -> None:
        positions.zero_()
        way()
        found = flat[positions.long()].abs().sort(descending=True).values
        if not torch.equal(found, wanted) or positions.unique().numel() != count:
            raise CheckFailed(f"select by {name}: not the largest elements")

    ways: dict[str, Way] = {OURS: lambda: ext.select_largest(flat, positions), TORCH: by_torch}
    return Task(flat.nbytes + positions.nbytes, ways, check)
