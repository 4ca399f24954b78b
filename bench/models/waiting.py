"""Models that compute by waiting: the processor is left to whoever synchronises.

On a machine with as many ranks as cores, computation and communication compete for the cores, and
a step tells little about how well they overlap. Here a layer's backward sleeps instead, as a host
does while its GPU computes, and then hands over a gradient. What is left is the wire.

`waiting` sleeps for a time in each layer, as a processor would compute: whatever else the host does
in backward, and whatever makes it late, lengthens the backward. `paced` sleeps until a time: its
layers end at fixed distances from the start, as those of a device do that computes on meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from bench.models.workload import mean_square, normal_batch, seeded, side
from examples.common.training import Workload

LAYERS = 24
WIDTH = 1024


class Clock:
    """Waits `seconds` from one layer to the next; `paced`: layers end at multiples of that after
    the first one's start."""

    def __init__(self, seconds: float, paced: bool) -> None:
        self._seconds, self._paced, self._end = seconds, paced, 0.0

    def wait(self, first: bool) -> None:
        """Sleeps, without the GIL, until a layer ends; `first`: no other was before it."""
        now = time.perf_counter()
        start = self._end if self._paced and not first else now
        self._end = start + self._seconds
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


class Waiting(nn.Module):
    """A chain of layers, each with one square weight, whose backwards take `seconds` in all."""

    def __init__(self, layers: int, width: int, seconds: float, paced: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width) / width) for _ in range(layers)
        )
        self._pattern = torch.randn(width, width)  # shared: only its values are of use
        self._clock = Clock(seconds / layers, paced)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs and outputs are of shape [batch, features]."""
        pattern, *_, end = (self._pattern.to(x.device), *self.weights)
        for weight in self.weights:
            x = _Wait.apply(x, weight, pattern, self._clock, weight is end)
        return x


def waiting(scale: float = 1.0, seconds: float = 0.2) -> Workload:
    """24 x 1024 x 1024 = 25 M elements, and `seconds` of backward in which nothing computes."""
    return _workload("waiting", scale, seconds)


def paced(scale: float = 1.0, seconds: float = 0.2) -> Workload:
    """The same, as a device computes that does not wait for the host."""
    return _workload("paced", scale, seconds)


def _workload(name: str, scale: float, seconds: float) -> Workload:
    width = side(WIDTH, scale)
    build = seeded(lambda: Waiting(LAYERS, width, seconds, paced=name == "paced"))
    return Workload(name, build, normal_batch(8, 16), mean_square)
