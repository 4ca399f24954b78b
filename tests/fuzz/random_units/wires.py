"""Wires of a case's units: the weights that a copy computes with, and how exact sums are."""

import random
from dataclasses import dataclass

import torch

from fastsync import Wire
from fastsync.config.arguments import PARAMETER_WIRES
from fastsync.wire.formats import FORMATS
from tests.fuzz.random_cases.wires import BOUNDS
from tests.wire.reference_codes import by_shares

__all__ = ["Wires", "draw_wires"]

DRAWN = (
    *(Wire(name) for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8")),
    Wire("fp32", form="two_shot"),
    Wire("int4", error_feedback=False),
    Wire("int8", stochastic=True),
)
MOST_REDUCTIONS = 3  # between two comparisons of gradients


@dataclass(frozen=True)
class Wires:
    """
    Attributes:
        gradients: a `Wire`; None: as they are.
        parameters: a format; None: as they are.
        low: what units compute in where that is another dtype; gradients are reduced in fp32 then.
    """

    gradients: Wire | None
    parameters: str | None
    low: torch.dtype | None

    @property
    def options(self):
        """Return the options for fully_shard()."""
        return {"wire": self.gradients or "fp32", "parameter_wire": self.parameters}

    def seen(self, exact, world, dim):
        """Return what modules compute with, in the dtype of the weight; None: the weight itself."""
        computes = self.low or exact.dtype
        narrow = computes is not torch.float32
        exempt = torch.float64 in (exact.dtype, computes)
        if self.parameters is None or exempt or (narrow and FORMATS[self.parameters].bits > 8):
            return None
        return by_shares(exact, self.parameters, world, dim).to(exact.dtype)

    def loss(self, dtype, sizes):
        """Return how far a sum of gradients may be off by coding; `sizes`: by rank, their
        magnitudes.
        """
        wire = self.gradients
        reduced = torch.float32 if self.low else dtype
        if wire is None or dtype is torch.float64:
            return torch.zeros_like(sizes[0])
        if reduced is not torch.float32 and FORMATS[wire.format].bits > 8:
            return torch.zeros_like(sizes[0])
        of_number, of_block = BOUNDS[wire.format]
        largest = sizes.amax(1, keepdim=True) if sizes.numel() else sizes
        each = of_number * sizes + of_block * MOST_REDUCTIONS * largest
        return (2 if wire.stochastic else 1) * each.sum(0)


def draw_wires(seed, low, note):
    """The same on every rank."""
    rng = random.Random(f"wires {seed}")
    gradients = rng.choice(DRAWN) if rng.random() < 0.4 else None
    parameters = rng.choice(PARAMETER_WIRES) if rng.random() < 0.4 else None
    note(f"gradients: {gradients.describe() if gradients else None}")
    note(f"parameters: {parameters}")
    return Wires(gradients, parameters, low)
