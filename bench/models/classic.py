"""Models that each stress one part of gradient synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.models.workload import (
    WEIGHT_SEED,
    Workload,
    data_generator,
    mean_square,
    normal_batch,
    share,
    side,
)


def _relu_stack(depth: int, width: int) -> nn.Module:
    """Linear + ReLU layers; He initialisation, as torch's default underflows in deep stacks."""
    torch.manual_seed(WEIGHT_SEED)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def small(scale: float = 1.0) -> Workload:
    """400 x (Linear(64, 64), ReLU) = 800 tensors of 1.7 M elements: per-tensor costs dominate."""
    depth = share(400, scale)
    return Workload("small", lambda: _relu_stack(depth, 64), normal_batch(16, 64), mean_square)


def wide(scale: float = 1.0) -> Workload:
    """6 x (Linear(2048, 2048), ReLU) = 25 M elements in 12 tensors: bytes moved dominate."""
    width = side(2048, scale)
    return Workload("wide", lambda: _relu_stack(6, width), normal_batch(8, width), mean_square)


class Transformer(nn.Module):
    """Token embedding, 6 pre-norm encoder layers, untied output projection; 17 M parameters."""

    def __init__(self, width: int = 384, vocabulary: int = 8192) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of tokens [batch, length]."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def transformer(scale: float = 1.0) -> Workload:
    """A 17 M transformer on 4 x 64 tokens: many tensor sizes, much computation to overlap with."""
    width, vocabulary = side(384, scale, multiple=6), side(8192, scale)

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return Transformer(width, vocabulary)

    def batch(rank: int, step: int) -> Tensor:
        return torch.randint(vocabulary, (4, 64), generator=data_generator(rank, step))

    return Workload("transformer", build, batch, mean_square)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.body(image) + self.shortcut(image))


def _build_conv(first: int) -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    convolution = nn.Conv2d(3, first, 7, 2, 3, bias=False)
    stem = [convolution, nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2)]
    blocks: list[nn.Module] = []
    channels_in = first
    for channels, stride in ((first, 1), (2 * first, 2), (4 * first, 2), (8 * first, 2)):
        blocks += [ResidualBlock(channels_in, channels, stride)]
        blocks += [ResidualBlock(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 10)
    )


def conv(scale: float = 1.0) -> Workload:
    """An 11 M residual network with BatchNorm on 4 x 3 x 64 x 64: buffers besides gradients."""
    first = side(64, scale)
    return Workload("conv", lambda: _build_conv(first), normal_batch(4, 3, 64, 64), mean_square)


def _build_ops400(depth: int) -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    return nn.Sequential(*layers)


def ops400(scale: float = 1.0) -> Workload:
    """100 x (Linear(64, 64), LayerNorm(64), ReLU) = 400 tensors, on which operators are counted."""
    depth = share(100, scale)
    return Workload("ops400", lambda: _build_ops400(depth), normal_batch(16, 64), torch.sum)
