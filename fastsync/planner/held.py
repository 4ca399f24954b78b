"""What a rank holds from step to step by the formulas of ZeRO: bytes per parameter, whatever the
model looks like.

A common table has 210 GB for stage 2 of 70 billion bf16 parameters on 8 ranks: 2 + 8/8 = 3.00 bytes
each, which forgets the shard of the gradients. With it, 2 + (2 + 8)/8 = 3.25 bytes make 227.5 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HELD", "Held", "held_by"]


@dataclass(frozen=True)
class Held:
    """Bytes per parameter: of itself, its gradient, the optimizer's state, and its master weight.

    Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models".
    """

    parameter: float
    gradient: float
    state: float
    master: float = 0.0

    def items(self, stage: int, world: int) -> dict[str, float]:
        """Bytes per parameter on each of `world` ranks, which share what `stage` says."""
        of_state, of_gradient, of_parameter = (1 / world if stage >= s else 1.0 for s in (1, 2, 3))
        return {
            "parameters": self.parameter * of_parameter,
            "gradients": self.gradient * of_gradient,
            "optimizer state": self.state * of_state,
            "master weights": self.master * of_state,
        }

    def per_rank(self, stage: int, world: int) -> float:
        """The sum of them."""
        return sum(self.items(stage, world).values())


HELD = {
    "fp32": Held(4, 4, 8),
    "bf16, states in fp32": Held(2, 2, 8),
    "bf16, states and master weights in fp32": Held(2, 2, 8, 4),
}


def held_by(itemsize: int, state_bytes: float, masters: bool) -> Held:
    """Of parameters of `itemsize` bytes, whose gradients are as wide.

    Args:
        state_bytes: of the optimizer, per parameter: 8 for Adam in fp32.
        masters: whether parameters of 16 bits have fp32 masters.
    """
    return Held(itemsize, itemsize, state_bytes, 4.0 if masters and itemsize == 2 else 0.0)
