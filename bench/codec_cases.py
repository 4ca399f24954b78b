"""What bench.kernels measures of the codecs: encode, reduce and decode by format, and top-k."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import torch_codes
from bench.errors import CheckFailed
from bench.kernel_cases import OURS, SCALE, SEED, Task, Way, shapes_of
from bench.models import Workload
from fastsync.build import extension
from fastsync.plan.layout import FlatLayout, slot_layout
from fastsync.wire.formats import FORMATS, Format, TopK

ENCODE, REDUCE, DECODE, SELECT = "encode", "reduce", "decode", "select"
TORCH = "torch"
SOURCES = 2  # ranks whose chunks are summed

# Largest error of a code, as a share of the block's largest magnitude; see csrc/kernels/codec.h.
BOUNDS = {
    "fp32": 0.0,
    "bf16": 2**-8,
    "fp16": 2**-11,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "int8": 1 / 252,
    "int4": 1 / 13.8,
}
# torch's way rounds the step of integers to bfloat16 downwards too, and then clamps.
SLACK = {OURS: 1.0001, TORCH: 1.6}


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
        if self.kind == SELECT:
            return _selection(workload, device)
        data = CodecData.of(workload, FORMATS[self.wire], device)
        make = {ENCODE: _encoding, REDUCE: _reduction, DECODE: _decoding}[self.kind]
        return make(data)


CODEC_CASES = (
    *(CodecCase(kind, wire) for wire in FORMATS for kind in (ENCODE, REDUCE, DECODE)),
    CodecCase(SELECT, "topk"),
)


@dataclass(frozen=True)
class CodecData:
    """Gradients, where they lie in a flat buffer, and buffers for codes.

    Attributes:
        wires: of each source.
    """

    format: Format
    gradients: list[Tensor]
    layout: FlatLayout
    flat: Tensor
    wires: list[Tensor]

    @classmethod
    def of(cls, workload: Workload, format: Format, device: torch.device) -> CodecData:
        gradients = random_gradients(workload, device)
        layout = slot_layout([g.numel() for g in gradients], format.block)
        flat = torch.zeros(layout.numel, device=device)
        nbytes = -(-format.coded_bytes(layout.numel) // 16) * 16
        wires = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(SOURCES)]
        return cls(format, gradients, layout, flat, wires)

    @property
    def plan(self) -> tuple[str, int]:
        return self.format.name, self.layout.numel

    @property
    def offsets(self) -> list[int]:
        return list(self.layout.offsets)

    @property
    def coded_bytes(self) -> int:
        return self.format.coded_bytes(self.layout.numel)

    @property
    def gradient_bytes(self) -> int:
        return sum(g.nbytes for g in self.gradients)

    def views(self, flat: Tensor) -> list[Tensor]:
        places = zip(self.layout.offsets, self.gradients, strict=True)
        return [flat[offset : offset + g.numel()].view(g.shape) for offset, g in places]

    def gathered(self) -> Tensor:
        """Gradients times SCALE, in the flat buffer, by torch."""
        torch._foreach_copy_(self.views(self.flat), self.gradients)
        return self.flat.mul_(SCALE)

    def encode(self, wire: Tensor) -> None:
        """By fastsync's kernel."""
        extension.load().encode(self.gradients, self.offsets, wire, self.plan, SCALE)

    def decoded(self, wire: Tensor) -> Tensor:
        """What a wire stands for, flat, by fastsync's kernel."""
        flat = torch.zeros_like(self.flat)
        extension.load().decode([flat], [0], wire, self.plan)
        return flat

    def expect(self, name: str, found: Tensor, wanted: Tensor) -> None:
        """
        Raises:
            CheckFailed: an element is off by more than one rounding of the format.
        """
        shape = (-1, self.format.block)
        error = (found.double() - wanted.double()).abs().view(shape)
        limit = wanted.double().abs().view(shape).amax(1, keepdim=True)
        if not bool((error <= limit * BOUNDS[self.format.name] * SLACK[name]).all()):
            raise CheckFailed(f"{self.format.name} by {name}: an error beyond one rounding")


def random_gradients(workload: Workload, device: torch.device) -> list[Tensor]:
    """fp32, of the workload's shapes."""
    generator = torch.Generator(device).manual_seed(SEED)
    shapes = shapes_of(workload)
    return [torch.randn(*shape, generator=generator, device=device) for shape in shapes]


def _encoding(data: CodecData) -> Task:
    kept: list[torch_codes.Code] = []

    def by_torch() -> None:
        kept[:] = [torch_codes.encode(data.format, data.gathered())]

    ways: dict[str, Way] = {OURS: lambda: data.encode(data.wires[0]), TORCH: by_torch}
    wanted = data.gathered().clone()

    def check(name: str, way: Way) -> None:
        data.wires[0].fill_(255)
        kept.clear()
        way()
        code = kept[0] if kept else None
        found = torch_codes.decode(data.format, code) if code else data.decoded(data.wires[0])
        data.expect(name, found, wanted)

    return Task(data.gradient_bytes + data.coded_bytes, ways, check)


def _reduction(data: CodecData) -> Task:
    ext = extension.load()
    for wire in data.wires:
        data.encode(wire)
        torch._foreach_neg_(data.gradients[::2])
    received, result = torch.cat(data.wires), torch.zeros_like(data.wires[0])
    codes = [torch_codes.encode(data.format, data.decoded(wire)) for wire in data.wires]
    kept: list[torch_codes.Code] = []

    def by_torch() -> None:
        kept[:] = [torch_codes.reduce(data.format, codes)]

    ways: dict[str, Way] = {
        OURS: lambda: ext.reduce(received, result, data.plan),
        TORCH: by_torch,
    }

    def check(name: str, way: Way) -> None:
        result.fill_(255)
        kept.clear()
        way()
        if kept:
            wanted = sum((torch_codes.decode(data.format, c) for c in codes), torch.zeros(()))
            data.expect(name, torch_codes.decode(data.format, kept[0]), wanted)
        else:
            wanted = sum((data.decoded(wire) for wire in data.wires), torch.zeros(()))
            data.expect(name, data.decoded(result), wanted)

    return Task((SOURCES + 1) * data.coded_bytes, ways, check)


def _decoding(data: CodecData) -> Task:
    ext = extension.load()
    data.encode(data.wires[0])
    code = torch_codes.encode(data.format, data.gathered())
    wanted = data.flat.clone()
    targets = [torch.empty_like(g) for g in data.gradients]

    def by_torch() -> None:
        torch._foreach_copy_(targets, data.views(torch_codes.decode(data.format, code)))

    ways: dict[str, Way] = {
        OURS: lambda: ext.decode(targets, data.offsets, data.wires[0], data.plan),
        TORCH: by_torch,
    }

    def check(name: str, way: Way) -> None:
        for target in targets:
            target.fill_(math.nan)
        way()
        found = torch.zeros_like(data.flat)
        torch._foreach_copy_(data.views(found), targets)
        data.expect(name, found, wanted)

    return Task(data.gradient_bytes + data.coded_bytes, ways, check)


def _selection(workload: Workload, device: torch.device) -> Task:
    flat = torch.cat([g.view(-1) for g in random_gradients(workload, device)])
    count = TopK().kept(flat.numel())
    positions = torch.zeros(count, dtype=torch.int32, device=device)
    ext = extension.load()

    def by_torch() -> None:
        positions.copy_(flat.abs().topk(count, sorted=False).indices)

    ways: dict[str, Way] = {OURS: lambda: ext.select_largest(flat, positions), TORCH: by_torch}
    wanted = flat.abs().sort(descending=True).values[:count]

    def check(name: str, way: Way) -> None:
        positions.zero_()
        way()
        found = flat[positions.long()].abs().sort(descending=True).values
        if not torch.equal(found, wanted) or positions.unique().numel() != count:
            raise CheckFailed(f"select by {name}: not the largest elements")

    return Task(flat.nbytes + positions.nbytes, ways, check)
