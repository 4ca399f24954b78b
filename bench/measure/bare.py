"""Parameters without a model, and collectives without an engine: one part alone, to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.report.formulas import bus_factor
from examples.common.ranks import Group
from examples.manual_parallel import by_hand

PROBES = 3
PROBE_SECONDS = 0.4
SMALLEST_PROBE, LARGEST_PROBE = 4 * 2**20, 64 * 2**20  # bytes


class _Feed(torch.autograd.Function):
    """Depends on all parameters; its backward hands over gradients that were made before."""

    @staticmethod
    def forward(ctx: Any, ready: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.ready = ready
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        handed = tuple(ctx.ready)
        ctx.ready.clear()  # so that autograd may keep them as they are
        return (None, *handed)


class BareList(nn.Module):
    """Parameters that no layer uses; `ready` holds the gradients of the next backward.

    Args:
        sizes: of each parameter: its elements, or its shape.
    """

    def __init__(self, sizes: Sequence[int | Sequence[int]], device: torch.device) -> None:
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.zeros(n, device=device)) for n in sizes)
        self.ready: list[Tensor] = []

    def forward(self) -> Tensor:
        loss: Tensor = _Feed.apply(self.ready, *self.list)
        return loss


class BareCollectives:
    """Sums each gradient in place, as soon as it is ready: no packing, no average, no check.

    No training works like this. It shows the time of the backend itself, without other costs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._started: list[Any] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._send)

    def _send(self, parameter: Tensor) -> None:
        self._started.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self) -> None:
        """Wait for all of them."""
        for work in self._started:
            work.wait()
        self._started.clear()


BARE = by_hand("bare", lambda module: BareCollectives(module).finish)


def all_reduce_rate(group: Group, bits_per_second: float | None) -> float:
    """Return the bytes per second that each rank sends during an all-reduce of a bare fp32 tensor.

    Args:
        bits_per_second: what the link was shaped to, so that a probe takes a moment.
    """
    wanted = LARGEST_PROBE if bits_per_second is None else int(bits_per_second / 8 * PROBE_SECONDS)
    size = max(SMALLEST_PROBE, min(LARGEST_PROBE, wanted))
    tensor = torch.zeros(size // 4, device=group.device)
    calls = []
    for _ in range(PROBES + 1):
        dist.barrier()
        calls.append(group.timed(lambda: dist.all_reduce(tensor)))
    slowest: list[float] = group.max(torch.tensor(calls[1:], dtype=torch.float64)).tolist()
    return bus_factor(group.world) * size / median(slowest)
