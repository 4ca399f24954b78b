"""Parameters without a model: drives what synchronises, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


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
