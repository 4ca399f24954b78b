"""The models that benchmarks train: each stresses another part of gradient synchronisation.

Weights are the same on every rank (`build` seeds them); data differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WEIGHT_SEED = 20_13


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        name: as given on the command line.
        build: makes the model on the CPU, the same one at every call.
        batch: the input of one (rank, step), on the CPU.
        loss: the scalar loss of the model's output.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor]
    loss: Callable[[Tensor], Tensor]


def data_generator(rank: int, step: int) -> torch.Generator:
    """A random generator that differs for every rank and step."""
    return torch.Generator().manual_seed(1 + rank * 1_000_003 + step)


def _mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def _normal_batch(*shape: int) -> Callable[[int, int], Tensor]:
    return lambda rank, step: torch.randn(*shape, generator=data_generator(rank, step))


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


def small() -> Workload:
    """400 x (Linear(64, 64), ReLU) = 800 tensors of 1.7 M elements: per-tensor costs dominate."""
    return Workload("small", lambda: _relu_stack(400, 64), _normal_batch(16, 64), _mean_square)


def wide() -> Workload:
    """6 x (Linear(2048, 2048), ReLU) = 25 M elements in 12 tensors: bytes moved dominate."""
    return Workload("wide", lambda: _relu_stack(6, 2048), _normal_batch(8, 2048), _mean_square)


class Transformer(nn.Module):
    """Token embedding, 6 pre-norm encoder layers, untied output projection; 17 M parameters."""

    vocabulary = 8192
    width = 384

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            self.width, 6, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of tokens [batch, length]."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def _build_transformer() -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    return Transformer()


def _token_batch(rank: int, step: int) -> Tensor:
    return torch.randint(Transformer.vocabulary, (4, 64), generator=data_generator(rank, step))


def transformer() -> Workload:
    """A 17 M transformer on 4 x 64 tokens: many tensor sizes, much computation to overlap with."""
    return Workload("transformer", _build_transformer, _token_batch, _mean_square)


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


def _build_conv() -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    blocks: list[nn.Module] = []
    channels_in = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [ResidualBlock(channels_in, channels, stride)]
        blocks += [ResidualBlock(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def conv() -> Workload:
    """An 11 M residual network with BatchNorm on 4 x 3 x 64 x 64: buffers besides gradients."""
    return Workload("conv", _build_conv, _normal_batch(4, 3, 64, 64), _mean_square)


def _build_ops400() -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    return nn.Sequential(*layers)


def ops400() -> Workload:
    """100 x (Linear(64, 64), LayerNorm(64), ReLU) = 400 tensors, on which operators are counted."""
    return Workload("ops400", _build_ops400, _normal_batch(16, 64), torch.sum)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "small": small,
    "transformer": transformer,
    "wide": wide,
    "conv": conv,
    "ops400": ops400,
}
