"""A model that computes by waiting: the processor is left to whoever synchronises.

On a machine with as many ranks as cores, computation and communication compete for the cores, and
a step tells little about how well they overlap. Here a layer's backward sleeps instead, as a host
does while its GPU computes, and then hands over a gradient. What is left is the wire.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from bench.models.workload import WEIGHT_SEED, Workload, mean_square, normal_batch, side

LAYERS = 24
WIDTH = 1024


class _Wait(torch.autograd.Function):
    """Passes its input on; its backward waits, then makes a gradient that depends on the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pattern: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x, pattern)
        ctx.seconds = seconds
        return x + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, pattern = ctx.saved_tensors
        time.sleep(ctx.seconds)  # without the GIL
        return gradients[0], pattern * gradients[0].sum() * x.mean(), None, None


class Waiting(nn.Module):
    """A chain of layers, each with one square weight, whose backwards take `seconds` in all."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) / width) for _ in range(layers)
        )
        self._pattern = torch.randn(width, width)  # shared: only its values are of use
        self._seconds = seconds / layers

    def forward(self, x: Tensor) -> Tensor:
        """Inputs and outputs are of shape [batch, features]."""
        pattern = self._pattern.to(x.device)
        for weight in self.weights:
            x = _Wait.apply(x, weight, pattern, self._seconds)
        return x


def waiting(scale: float = 1.0, seconds: float = 0.2) -> Workload:
    """24 x 1024 x 1024 = 25 M elements, and `seconds` of backward in which nothing computes."""
    width = side(WIDTH, scale)

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return Waiting(LAYERS, width, seconds)

    return Workload("waiting", build, normal_batch(8, 16), mean_square)
