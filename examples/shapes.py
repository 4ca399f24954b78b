"""Pictures to classify, made and not downloaded: four shapes of any place and size, in noise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

SIDE = 16
CLASSES = ("disc", "square", "ring", "plus")
NOISE = 0.5


def shapes(count: int, seed: int) -> TensorDataset:
    """`count` pairs of a picture, fp32 [1, SIDE, SIDE], and its class, int64."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    centres = SIDE / 2 + 2.5 * (2 * torch.rand(count, 2, generator=generator) - 1)
    sizes = 3.0 + 2.5 * torch.rand(count, 1, 1, generator=generator)
    pictures = _draw(labels, centres, sizes)
    pictures += NOISE * torch.randn(pictures.shape, generator=generator)
    return TensorDataset(pictures[:, None], labels)


def _draw(labels: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """[count, SIDE, SIDE]: 1 inside the shape, 0 around it."""
    axis = torch.arange(SIDE) + 0.5
    across = (axis[None, None, :] - centres[:, 0, None, None]).abs()
    down = (axis[None, :, None] - centres[:, 1, None, None]).abs()
    radius, farther = (across.square() + down.square()).sqrt(), torch.maximum(across, down)
    masks = [
        radius < sizes,
        farther < 0.9 * sizes,
        (radius - 0.8 * sizes).abs() < 1.0,
        (torch.minimum(across, down) < 1.0) & (farther < sizes),
    ]
    return torch.stack(masks)[labels, torch.arange(len(labels))].float()
