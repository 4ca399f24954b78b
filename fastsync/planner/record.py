"""The record of one traced step of a model: operations, allocations, gradients, in order.

Pure data, which replays read as often as they like. A step is a forward and a backward; the
optimizer's step is traced by itself, once per way in which its state is spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastsync.reducer.buckets import ParamSpec

ROOT = 0  # number of the unit of what no other unit has


class Mark(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: "op", "alloc", "free", "grad" (a gradient is complete), "backward" (it begins); of a
            unit, "enter" and "leave" (its forward), "return" and "through" (its backward);
            "scratch": a CPU's library held so much for a moment.
        place: number of the storage, of the parameter, or of the unit.
        size: bytes: moved by an operation, allocated, held, or of the gradient.
        work: floating-point operations, a multiplication and an addition being two.
    """

    kind: str
    place: int = 0
    size: float = 0.0
    work: float = 0.0


@dataclass(frozen=True)
class TracedParam:
    """A parameter that is trained.

    Attributes:
        unit: number of the unit that stage 3 gathers it with; 0: that of the root.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def spec(self, index: int, device: str = "cpu") -> ParamSpec:
        """Return the parameter as the engine plans with it."""
        return ParamSpec(index, self.numel, self.dtype, torch.device(device))


@dataclass(frozen=True)
class Record:
    """A traced step.

    Attributes:
        params: those that are trained, in order of registration.
        frozen: bytes of parameters that are not.
        buffers: bytes of the module's buffers.
        inputs: bytes of a batch.
        samples: in a batch, its first dimension.
        tokens: in a batch of token numbers; else 0.
        marks: in order; allocations without parameters, buffers and inputs.
        blocks: that the model consists of, besides what lies in none.
    """

    model: str
    params: tuple[TracedParam, ...]
    frozen: int
    buffers: int
    inputs: int
    samples: int
    tokens: int
    marks: tuple[Mark, ...]
    blocks: int

    @property
    def numel(self) -> int:
        """Parameters that are trained."""
        return sum(param.numel for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return sum(param.nbytes for param in self.params)

    @property
    def order(self) -> list[int]:
        """Parameters in the order in which their gradients are complete; then those without."""
        last = {mark.place: at for at, mark in enumerate(self.marks) if mark.kind == "grad"}
        unused = (i for i in reversed(range(len(self.params))) if i not in last)
        return [*sorted(last, key=last.__getitem__), *unused]


@dataclass(frozen=True)
class Allocations:
    """Memory of an optimizer, and what it needs while it steps.

    Attributes:
        kept: bytes of its state after a step.
        peak: most bytes beyond that during a step.
        moved: bytes that a step reads and writes.
    """

    kept: int
    peak: int
    moved: float

    @classmethod
    def of(cls, marks: Sequence[Mark], kept: int) -> Allocations:
        """From the marks of a step that found its state made."""
        live = most = 0.0
        sizes: dict[int, float] = {}
        for mark in marks:
            if mark.kind == "alloc":
                sizes[mark.place] = mark.size
                live += mark.size
                most = max(most, live)
            elif mark.kind == "free":
                live -= sizes.pop(mark.place, 0.0)
        return cls(kept, round(most), sum(m.size for m in marks if m.kind == "op"))
