"""Models that each stress one part of gradient synchronisation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bench.models.workload import normal_batch, seeded, share, side, tokens
from examples.common.training import Workload


def _relu_stack(depth: int, width: int) -> nn.Module:
    """Linear + ReLU layers; He initialisation, as torch's default underflows in deep stacks."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def small(scale: float = 1.0, width: int = 64) -> Workload:
    """400 x (Linear(64, 64), ReLU) = 800 tensors of 1.7 M elements: per-tensor costs dominate."""
    depth = share(400, scale)
    return seeded("small", partial(_relu_stack, depth, width), normal_batch(16, width))


def wide(scale: float = 1.0) -> Workload:
    """6 x (Linear(2048, 2048), ReLU) = 25 M elements in 12 tensors: bytes moved dominate."""
    width = side(2048, scale)
    return seeded("wide", partial(_relu_stack, 6, width), normal_batch(8, width))


def deep(scale: float = 1.0) -> Workload:
    """32 x (Linear(1536, 1536), ReLU) = 76 M elements in 64 tensors: what a step holds besides."""
    width = side(1536, scale)
    return seeded("deep", partial(_relu_stack, 32, width), normal_batch(8, width))


def _encoder(width: int, vocabulary: int) -> nn.Module:
    """Return an encoder: token embedding, 6 pre-norm layers, untied output projection; from tokens
    [batch, length] to logits [batch, length, vocabulary]."""
    layer = nn.TransformerEncoderLayer(
        width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    parts = OrderedDict[str, nn.Module](
        embedding=nn.Embedding(vocabulary, width),
        encoder=nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        head=nn.Linear(width, vocabulary, bias=False),
    )
    return nn.Sequential(parts)


def transformer(scale: float = 1.0) -> Workload:
    """Return a 17 M transformer on 4 x 64 tokens: many tensor sizes, much computation for
    overlap."""
    width, vocabulary = side(384, scale, multiple=6), side(8192, scale)
    return seeded("transformer", partial(_encoder, width, vocabulary), tokens(vocabulary, 4, 64))


Layer = tuple[int, int, int]  # a convolution's channels, size and stride


class Residual(nn.Module):
    """Convolutions with BatchNorm, and ReLU between them, around a shortcut."""

    def __init__(self, channels_in: int, layers: Sequence[Layer]) -> None:
        super().__init__()
        body: list[nn.Module] = []
        before, stride = channels_in, 1
        for channels, size, step in layers:
            convolution = nn.Conv2d(before, channels, size, step, size // 2, bias=False)
            body += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
            before, stride = channels, stride * step
        self.body = nn.Sequential(*body[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != before:
            convolution = nn.Conv2d(channels_in, before, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(before))

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.body(image) + self.shortcut(image))


def residual_network(
    first: int, pool: nn.Module, blocks: Sequence[Sequence[Layer]], classes: int
) -> nn.Module:
    """Return a stem with `first` channels, residual blocks, and a classifier."""
    stem = nn.Conv2d(3, first, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(first), nn.ReLU(), pool]
    channels = first
    for block in blocks:
        layers.append(Residual(channels, block))
        channels = block[-1][0]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, *head)


def conv(scale: float = 1.0) -> Workload:
    """Return an 11 M residual network with BatchNorm on 4 x 3 x 64 x 64, which has buffers."""
    first = side(64, scale)
    blocks = [
        ((first * 2**stage, 3, 2 if stage and not index else 1), (first * 2**stage, 3, 1))
        for stage in range(4)
        for index in range(2)
    ]
    make = lambda: residual_network(first, nn.MaxPool2d(2), blocks, 10)  # noqa: E731
    return seeded("conv", make, normal_batch(4, 3, 64, 64))


def ops400(scale: float = 1.0) -> Workload:
    """100 x (Linear(64, 64), LayerNorm(64), ReLU) = 400 tensors, on which operators are counted."""

    def layers() -> nn.Module:
        parts = ((nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(share(100, scale)))
        return nn.Sequential(*(layer for part in parts for layer in part))

    return seeded("ops400", layers, normal_batch(16, 64), torch.sum)
