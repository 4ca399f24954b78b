"""What bench.kernels measures of transfers: cases, and the ways to do each. Codecs: codec_cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.models import Workload
from fastsync.build import extension
from fastsync.plan.layout import flat_layout

Way = Callable[[], object]

SCALE = 0.5  # 1/N on two ranks
SEED = 31
PACK, UNPACK = "pack", "unpack"
OURS = "fastsync"


@dataclass(frozen=True)
class Task:
    """A case with data to do it on.

    Attributes:
        moved: bytes, each element read once and written once in the format that it has there.
        ways: every way to do it, by name.
        check: runs the way of a name once; raises CheckFailed where its result is wrong.
    """

    moved: int
    ways: dict[str, Way]
    check: Callable[[str, Way], None]


@dataclass(frozen=True)
class Case:
    """One transfer between scattered gradients and a flat buffer.

    Attributes:
        kind: PACK (gradients -> flat) or UNPACK (flat -> gradients).
        gradient: dtype of the gradients.
        flat: dtype of the buffer.
        scale: what every element is multiplied by.
    """

    kind: str
    gradient: torch.dtype
    flat: torch.dtype
    scale: float

    @property
    def name(self) -> str:
        """As on the command line, for example "pack fp32>bf16"."""
        ends = (self.gradient, self.flat) if self.kind == PACK else (self.flat, self.gradient)
        return f"{self.kind} {'>'.join(_short(dtype) for dtype in ends)}"


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


CASES = (
    Case(PACK, torch.float32, torch.float32, SCALE),
    Case(PACK, torch.float32, torch.bfloat16, SCALE),
    Case(PACK, torch.float32, torch.float16, SCALE),
    Case(PACK, torch.bfloat16, torch.bfloat16, SCALE),
    Case(UNPACK, torch.float32, torch.float32, 1.0),
    Case(UNPACK, torch.float32, torch.bfloat16, 1.0),
    Case(UNPACK, torch.float32, torch.float16, 1.0),
)


@dataclass(frozen=True)
class Scattered:
    """A model's gradients and a flat buffer for them, filled with random numbers.

    Attributes:
        offsets: the first element of each gradient in `flat`.
        views: `flat` at those places, in the gradients' shapes.
    """

    name: str
    gradients: list[Tensor]
    flat: Tensor
    offsets: tuple[int, ...]
    views: list[Tensor]

    def bytes_moved(self, case: Case) -> int:
        """Each element read once and written once."""
        elements = sum(g.numel() for g in self.gradients)
        return elements * (case.gradient.itemsize + case.flat.itemsize)


def shapes_of(workload: Workload) -> list[torch.Size]:
    """Of its gradients."""
    with torch.device("meta"):
        return [p.shape for p in workload.build().parameters()]


def summary(workload: Workload) -> str:
    """One line for people."""
    shapes = shapes_of(workload)
    elements = sum(map(math.prod, shapes))
    return f"{workload.name}: {len(shapes)} gradients, {elements / 1e6:.1f} M elements"


def make_scattered(workload: Workload, case: Case, device: torch.device) -> Scattered:
    """Random gradients of the workload's shapes, and a random buffer laid out as fastsync does."""
    shapes = shapes_of(workload)
    generator = torch.Generator(device).manual_seed(SEED)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layout = flat_layout([math.prod(shape) for shape in shapes], world_size=2, flags=False)
    gradients = [random(*shape, dtype=case.gradient) for shape in shapes]
    flat = random(layout.numel, dtype=case.flat)
    views = [
        flat[offset : offset + g.numel()].view(g.shape)
        for offset, g in zip(layout.offsets, gradients, strict=True)
    ]
    return Scattered(workload.name, gradients, flat, layout.offsets, views)


def methods(case: Case, data: Scattered) -> dict[str, Way]:
    """Every way to do a case, by name."""
    return _packers(case, data) if case.kind == PACK else _unpackers(case, data)


def _packers(case: Case, data: Scattered) -> dict[str, Way]:
    gradients, views, flat = data.gradients, data.views, data.flat
    ext, offsets = extension.load(), list(data.offsets)
    ways: dict[str, Way] = {
        OURS: lambda: ext.pack(gradients, gradients, offsets, flat, case.scale),
        "foreach_copy": lambda: _foreach_pack(gradients, views, flat, case.scale),
        "loop": lambda: _loop_pack(gradients, views, case.scale),
    }
    if case.gradient is case.flat:
        # Nothing says where torch.cat puts a tensor but their order: a buffer without padding.
        dense = flat.new_empty(sum(g.numel() for g in gradients))
        ways["cat"] = lambda: _cat_pack(gradients, dense, case.scale)
        ways["flatten"] = lambda: _flatten_pack(gradients, case.scale)
    return ways


def _unpackers(case: Case, data: Scattered) -> dict[str, Way]:
    gradients, views, flat = data.gradients, data.views, data.flat
    ext, offsets = extension.load(), list(data.offsets)
    return {
        OURS: lambda: ext.unpack(gradients, offsets, flat, case.scale, False),
        "foreach_copy": lambda: torch._foreach_copy_(gradients, views),
        "loop": lambda: [g.copy_(v) for g, v in zip(gradients, views, strict=True)],
    }


def _foreach_pack(gradients: list[Tensor], views: list[Tensor], flat: Tensor, scale: float) -> None:
    torch._foreach_copy_(views, gradients)
    flat.mul_(scale)


def _loop_pack(gradients: Sequence[Tensor], views: Sequence[Tensor], scale: float) -> None:
    """As DDP does by default: one fused multiplication per tensor."""
    for gradient, view in zip(gradients, views, strict=True):
        torch.mul(gradient, scale, out=view)


def _flatten_pack(gradients: Sequence[Tensor], scale: float) -> Tensor:
    """As Apex does: a buffer anew in every step."""
    flat: Tensor = torch._utils._flatten_dense_tensors(gradients)
    return flat.mul_(scale)


def _cat_pack(gradients: Sequence[Tensor], dense: Tensor, scale: float) -> Tensor:
    torch.cat([gradient.view(-1) for gradient in gradients], out=dense)
    return dense.mul_(scale)
