"""Seeds, sizes and batches of the models."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.common.training import Workload

WEIGHT_SEED = 20_13
CPU_SCALE = 1 / 16  # of models of real size, so that two CPU cores take a fraction of a second


def data_generator(rank: int, step: int) -> torch.Generator:
    """Return a random generator that differs for every rank and step."""
    return torch.Generator().manual_seed(1 + rank * 1_000_003 + step)


def mean_square(output: Tensor) -> Tensor:
    """Return a loss for models whose output is compared with nothing."""
    return output.pow(2).mean()


def seeded(
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[int, int], Tensor],
    loss: Callable[[Tensor], Tensor] = mean_square,
) -> Workload:
    """Return a model, made with the same weights at every call, and its data."""

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return make()

    return Workload(name, build, batch, loss)


def normal_batch(*shape: int) -> Callable[[int, int], Tensor]:
    """Normally distributed inputs of one shape."""
    return lambda rank, step: torch.randn(*shape, generator=data_generator(rank, step))


def tokens(vocabulary: int, *shape: int) -> Callable[[int, int], Tensor]:
    """Return the numbers of words, of one shape."""
    return lambda rank, step: torch.randint(vocabulary, shape, generator=data_generator(rank, step))


def side(size: int, scale: float, multiple: int = 1) -> int:
    """Return a width, such that `scale` multiplies the elements of a matrix of two such sides."""
    return max(1, round(size * math.sqrt(scale) / multiple)) * multiple


def share(count: int, scale: float) -> int:
    """Return a number of things, multiplied by `scale`; at least one."""
    return max(1, round(count * scale))
