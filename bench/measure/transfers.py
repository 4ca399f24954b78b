"""Pack and unpack as tasks: gradients to a flat buffer and back, in every way, each checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from examples.common.ranks import CheckFailed
from examples.common.training import Workload
from examples.common.variants import OURS
from fastsync._build import extension
from fastsync.reducer.bucket_layout import flat_layout

Way = Callable[[], object]

SCALE = 0.5  # 1/N on two ranks
SEED = 31
PACK, UNPACK = "pack", "unpack"
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Task:
    """A case with data to do it on.

    Attributes:
        name: of the case.
        moved: bytes, each element read once and written once in the format that it has there.
        ways: every way to do it, by name.
        targets: what the ways write.
        judged: from the name of a way and what it returned: what it found, what it should have
            found, and the largest error that it may have made.
    """

    name: str
    moved: int
    ways: dict[str, Way]
    targets: Sequence[Tensor]
    judged: Callable[[str, Any], tuple[Tensor, Tensor, Tensor | float]]

    def check(self, name: str, way: Way) -> None:
        """Run a way once; raise CheckFailed if an element of its result is wrong."""
        for target in self.targets:  # a way that writes nothing is found out
            blank = 255 if target.dtype is torch.uint8 else 0
            target.fill_(math.nan if target.is_floating_point() else blank)
        found, wanted, limit = self.judged(name, way())
        if not bool(((found.double() - wanted.double()).abs() <= limit).all()):
            raise CheckFailed(f"{self.name} by {name}: not what the reference says")


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
        """Return the name on the command line, for example "pack fp32>bf16"."""
        ends = (self.gradient, self.flat) if self.kind == PACK else (self.flat, self.gradient)
        return f"{self.kind} {'>'.join(SHORT[dtype] for dtype in ends)}"

    def task(self, workload: Workload, device: torch.device) -> Task:
        """Return the case with random gradients of the workload's shapes."""
        data, packs = make_scattered(workload, self, device), self.kind == PACK
        sources, targets = data.gradients, data.views(data.flat)
        if not packs:
            sources, targets = targets, sources
        dtype = self.flat if packs else self.gradient
        wanted = joined([(source.double() * self.scale).to(dtype) for source in sources])
        # fastsync's kernels round once, which the reference does too. torch rounds before it
        # multiplies, so that its methods may differ by one more rounding of the buffer's dtype.
        limits = torch.finfo(self.flat)
        slack = limits.eps * (wanted.double().abs() + limits.smallest_normal)

        def judged(name: str, result: object) -> tuple[Tensor, Tensor, Tensor | float]:
            dense = packs and isinstance(result, Tensor)  # in a buffer of the way's own
            received = cast(Tensor, result) if dense else joined(targets)
            return received, wanted, 0.0 if name == OURS else slack

        moved = wanted.numel() * (self.gradient.itemsize + self.flat.itemsize)
        return Task(self.name, moved, methods(self, data), targets, judged)


CASES = (
    *(Case(PACK, torch.float32, dtype, SCALE) for dtype in SHORT),
    Case(PACK, torch.bfloat16, torch.bfloat16, SCALE),
    *(Case(UNPACK, torch.float32, dtype, 1.0) for dtype in SHORT),
)


@dataclass
class Scattered:
    """Gradients, and a flat buffer for them.

    Attributes:
        offsets: the first element of each gradient in `flat`.
    """

    gradients: list[Tensor]
    flat: Tensor
    offsets: list[int]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a buffer laid out as `flat` is, one for each gradient."""
        places = zip(self.offsets, self.gradients, strict=True)
        return [flat[offset : offset + g.numel()].view(g.shape) for offset, g in places]


def shapes_of(workload: Workload) -> list[torch.Size]:
    """Return the shapes of a workload's gradients."""
    with torch.device("meta"):
        return [p.shape for p in workload.build().parameters()]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Their elements in one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def make_scattered(workload: Workload, case: Case, device: torch.device) -> Scattered:
    """Return random gradients of the workload's shapes, and a random buffer in fastsync's
    layout."""
    shapes = shapes_of(workload)
    generator = torch.Generator(device).manual_seed(SEED)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layout = flat_layout([math.prod(shape) for shape in shapes], world_size=2, flags=False)
    gradients = [random(*shape, dtype=case.gradient) for shape in shapes]
    return Scattered(gradients, random(layout.numel, dtype=case.flat), list(layout.offsets))


def methods(case: Case, data: Scattered) -> dict[str, Way]:
    """Return every way to do a case, by name."""
    gradients, flat, offsets = data.gradients, data.flat, data.offsets
    views = data.views(flat)
    bundle, scale = extension.load().Bundle(gradients, offsets), case.scale
    pairs = list(zip(gradients, views, strict=True))
    if case.kind == UNPACK:
        return {
            OURS: lambda: bundle.unpack(flat, scale),
            "foreach_copy": lambda: torch._foreach_copy_(gradients, views),
            "loop": lambda: [g.copy_(v) for g, v in pairs],
        }

    def foreach() -> None:
        torch._foreach_copy_(views, gradients)
        flat.mul_(scale)

    ways: dict[str, Way] = {
        OURS: lambda: bundle.pack(flat, scale),
        "foreach_copy": foreach,
        # As DDP does by default: one fused multiplication per tensor.
        "loop": lambda: [torch.mul(g, scale, out=v) for g, v in pairs],
    }
    if case.gradient is case.flat:
        # Nothing says where torch.cat puts a tensor but their order: a buffer without padding.
        dense = flat.new_empty(sum(g.numel() for g in gradients))
        rows = [g.view(-1) for g in gradients]
        ways["cat"] = lambda: torch.cat(rows, out=dense).mul_(scale)
        # As Apex does: a buffer anew in every step.
        ways["flatten"] = lambda: torch._utils._flatten_dense_tensors(gradients).mul_(scale)
    return ways
