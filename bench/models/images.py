"""Image classifiers: a residual network and a vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.models.workload import (
    CPU_SCALE,
    WEIGHT_SEED,
    Workload,
    mean_square,
    normal_batch,
    share,
    side,
)

CLASSES = 1000
IMAGE = 224
BATCH = 32


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the stride is at the 3x3 one."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        out = channels * self.expansion
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, image: Tensor) -> Tensor:
        return torch.relu(self.body(image) + self.shortcut(image))


def _build_resnet50(first: int) -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    layers: list[nn.Module] = [
        nn.Conv2d(3, first, 7, 2, 3, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels_in = first
    for stage, blocks in enumerate((3, 4, 6, 3)):
        channels = first * 2**stage
        for index in range(blocks):
            stride = 2 if stage and not index else 1
            layers.append(Bottleneck(channels_in, channels, stride))
            channels_in = channels * Bottleneck.expansion
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES)]
    return nn.Sequential(*layers, *head)


def resnet50(scale: float = CPU_SCALE) -> Workload:
    """ResNet-50 (He et al., 2015): 25.6 M parameters in 161 tensors, on 32 images of 224 x 224."""
    first, batch = side(64, scale), share(BATCH, scale)
    images = normal_batch(batch, 3, IMAGE, IMAGE)
    return Workload("resnet50", lambda: _build_resnet50(first), images, mean_square)


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions and 12 pre-norm encoder layers."""

    patch = 16
    heads = 12

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, self.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.patches = nn.Conv2d(3, width, self.patch, self.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        positions = (IMAGE // self.patch) ** 2 + 1
        self.positions = nn.Parameter(0.02 * torch.randn(1, positions, width))
        self.encoder = nn.TransformerEncoder(layer, 12, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, 3, 224, 224]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.positions
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


def _build_vit(width: int) -> nn.Module:
    torch.manual_seed(WEIGHT_SEED)
    return VisionTransformer(width)


def vit(scale: float = CPU_SCALE) -> Workload:
    """ViT-B/16 (Dosovitskiy et al., 2020): 86.6 M parameters, on 32 images of 224 x 224."""
    width, batch = side(768, scale, VisionTransformer.heads), share(BATCH, scale)
    images = normal_batch(batch, 3, IMAGE, IMAGE)
    return Workload("vit", lambda: _build_vit(width), images, mean_square)
