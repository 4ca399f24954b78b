"""A model that computes by waiting, and leaves the processor to synchronisation.

On a machine with as many ranks as cores, computation and communication compete for the cores, and
a step says little about how well they overlap. Here a layer's backward sleeps instead, as a host
does while its GPU computes, and then hands over a gradient. Only the cost of the wire remains.
Layers end at fixed distances from the start of the backward, as on a device that computes on
meanwhile.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.models.workload import normal_batch, seeded, side
from examples.common.training import Workload

LAYERS = 24
WIDTH = 1024


class Clock:
    """Waits until layers end, at multiples of `seconds` after the first one's start."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, 0.0

    def pace(self, seconds: float) -> None:
        """Set the time of a layer."""
        self._seconds = seconds

    def wait(self, first: bool) -> None:
        """Sleep, without the GIL, until a layer ends; `first`: no other was before it."""
        now = time.perf_counter()
        self._end = (now if first else self._end) + self._seconds
        time.sleep(max(0.0, self._end - now))


class _Wait(torch.autograd.Function):
    """Passes its input on; its backward makes a gradient that depends on the input, and waits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, pattern: Tensor, clock: Clock, last: bool
    ) -> Tensor:
        ctx.save_for_backward(x, pattern)
        ctx.clock = clock
        ctx.last = last
        return x + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, pattern = ctx.saved_tensors
        gradient = pattern * gradients[0].sum() * x.mean()
        ctx.clock.wait(first=ctx.last)
        return gradients[0], gradient, None, None, None


class Paced(nn.Module):
    """A chain of layers, each with one square weight, whose backwards take `seconds` in all."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) / width) for _ in range(layers)
        )
        self._pattern = torch.randn(width, width)  # shared: only its values are of use
        self._clock = Clock(seconds / layers)

    def pace(self, seconds: float) -> None:
        """Set the time of the backwards of all layers."""
        self._clock.pace(seconds / len(self.weights))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs and outputs are of shape [batch, features]."""
        pattern, *_, end = (self._pattern.to(x.device), *self.weights)
        for weight in self.weights:
            x = _Wait.apply(x, weight, pattern, self._clock, weight is end)
        return x


def paced(scale: float = 1.0, seconds: float = 0.2) -> Workload:
    """24 x 1024 x 1024 = 25 M elements, and `seconds` of backward in which nothing computes."""
    width = side(WIDTH, scale)
    return seeded("paced", partial(Paced, LAYERS, width, seconds), normal_batch(8, 16))
