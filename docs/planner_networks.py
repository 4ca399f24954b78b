"""Image classifiers that others have published measurements of, by the shapes in their papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench.models.classic import residual_network
from bench.models.known import CLASSES

__all__ = ["IMAGES", "NETWORKS"]

Layer = tuple[int, int, int]  # channels, and height and width of the kernel
IMAGES = {"Inception V3": 299}  # pixels of a side; of all others 224


def resnet(counts: Sequence[int]) -> nn.Module:
    """He et al., 2015: so many bottlenecks at each resolution."""
    blocks = []
    for stage, count in enumerate(counts):
        width = 64 << stage
        strides = [2 if stage else 1, *[1] * (count - 1)]
        blocks += [((width, 1, 1), (width, 3, step), (4 * width, 1, 1)) for step in strides]
    return residual_network(64, nn.MaxPool2d(3, 2, 1), blocks, CLASSES)


def vgg16() -> nn.Module:
    """Simonyan and Zisserman, 2014: 138 M parameters, 124 M of them in the classifier."""
    layers: list[nn.Module] = []
    before = 3
    for count, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    hidden = (nn.Linear(49 * before, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(4096, CLASSES))


def chain(before: int, layers: Sequence[Layer], stride: int = 1, pad: bool = True) -> nn.Sequential:
    """Convolutions with BatchNorm and ReLU; the last one has the stride, and shrinks with it."""
    made: list[nn.Module] = []
    for number, (channels, height, width) in enumerate(layers, 1):
        last = number == len(layers)
        step = stride if last else 1
        padding = (height // 2, width // 2) if pad and step == 1 else (0, 0)
        convolution = nn.Conv2d(before, channels, (height, width), step, padding, bias=False)
        made += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*made)


class Branches(nn.Module):
    """Ways that see the same image, side by side."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.cat([way(image) for way in self.ways], 1)


def mixed(before: int, pooled: int, *ways: Sequence[Layer]) -> nn.Module:
    """Ways of convolutions, and one that averages first."""
    mean = nn.Sequential(nn.AvgPool2d(3, 1, 1), chain(before, [(pooled, 1, 1)]))
    return Branches(*(chain(before, way) for way in ways), mean)


def halved(before: int, *ways: Sequence[Layer]) -> nn.Module:
    """Ways to half the resolution, and one that takes the largest of neighbours."""
    return Branches(*(chain(before, way, stride=2) for way in ways), nn.MaxPool2d(3, 2))


def split(before: int, first: Sequence[Layer]) -> nn.Module:
    """A way that ends in a row and a column beside each other."""
    channels = first[-1][0]
    ends = Branches(chain(channels, [(384, 1, 3)]), chain(channels, [(384, 3, 1)]))
    return nn.Sequential(chain(before, first), ends)


def inception() -> nn.Module:
    """Szegedy et al., 2015, without the auxiliary classifier: 24 M parameters."""
    layers: list[nn.Module] = [chain(3, [(32, 3, 3)], stride=2), chain(32, [(32, 3, 3)], pad=False)]
    layers += [chain(32, [(64, 3, 3)]), nn.MaxPool2d(3, 2), chain(64, [(80, 1, 1)])]
    layers += [chain(80, [(192, 3, 3)], pad=False), nn.MaxPool2d(3, 2)]
    before = 192
    double = [(64, 1, 1), (96, 3, 3), (96, 3, 3)]
    for pooled in (32, 64, 64):
        layers.append(mixed(before, pooled, [(64, 1, 1)], [(48, 1, 1), (64, 5, 5)], double))
        before = 224 + pooled
    layers.append(halved(before, [(384, 3, 3)], double))
    for n in (128, 160, 160, 192):
        short = [(n, 1, 1), (n, 1, 7), (192, 7, 1)]
        long = [(n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7)]
        layers.append(mixed(768, 192, [(192, 1, 1)], short, long))
    wide = [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)]
    layers.append(halved(768, [(192, 1, 1), (320, 3, 3)], wide))
    for before in (1280, 2048):
        ways = split(before, [(384, 1, 1)]), split(before, [(448, 1, 1), (384, 3, 3)])
        layers.append(Branches(mixed(before, 192, [(320, 1, 1)]), *ways))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "Inception V3": inception,
    "ResNet-50": lambda: resnet((3, 4, 6, 3)),
    "ResNet-101": lambda: resnet((3, 4, 23, 3)),
    "VGG-16": vgg16,
}
