"""Models of real size: image classifiers, language models and recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.classic import residual_network
from bench.models.workload import (
    CPU_SCALE,
    data_generator,
    mean_square,
    normal_batch,
    seeded,
    share,
    side,
    tokens,
)
from examples.common.training import Workload
from examples.gpt import Block, Shape

CLASSES, IMAGE, BATCH = 1000, 224, 32
TABLES, DENSE, FEATURES = 26, 13, 64


def resnet50(scale: float = CPU_SCALE) -> Workload:
    """ResNet-50 (He et al., 2015): 25.6 M parameters in 161 tensors, on 32 images of 224 x 224."""
    first = side(64, scale)
    blocks = []
    for stage, count in enumerate((3, 4, 6, 3)):
        width = first * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            blocks.append(((width, 1, 1), (width, 3, stride), (4 * width, 1, 1)))
    build = seeded(lambda: residual_network(first, nn.MaxPool2d(3, 2, 1), blocks, CLASSES))
    images = normal_batch(share(BATCH, scale), 3, IMAGE, IMAGE)
    return Workload("resnet50", build, images, mean_square)


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
        rows = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.positions
        logits: Tensor = self.head(self.encoder(rows)[:, 0])
        return logits


def vit(scale: float = CPU_SCALE) -> Workload:
    """ViT-B/16 (Dosovitskiy et al., 2020): 86.6 M parameters, on 32 images of 224 x 224."""
    width = side(768, scale, VisionTransformer.heads)
    images = normal_batch(share(BATCH, scale), 3, IMAGE, IMAGE)
    return Workload("vit", seeded(lambda: VisionTransformer(width)), images, mean_square)


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class GPT2(nn.Module):
    """Learned positions, 12 blocks, and an output projection tied to the token embedding."""

    heads = 12

    def __init__(self, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(Shape(width, self.heads)) for _ in range(12)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens [batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return _next_token_loss(functional.linear(x, self.tokens.weight), tokens)


def gpt2(scale: float = CPU_SCALE) -> Workload:
    """GPT-2 (Radford et al., 2019), 124 M parameters in 148 tensors, on 8 x 1024 tokens."""
    width, vocabulary = side(768, scale, GPT2.heads), side(50257, scale)
    batch, length = share(8, scale), side(1024, scale)
    build = seeded(lambda: GPT2(width, vocabulary, length))
    return Workload("gpt2", build, tokens(vocabulary, batch, length), torch.mean)


class LlamaLayer(nn.Module):
    """RMSNorm, causal attention with 32 query heads on 8 keys, and a gated SiLU layer."""

    heads, key_heads = 32, 8

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        keys = width // self.heads * self.key_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width], as the input."""
        normed = self.norm1(x)
        layers = (
            (self.query, self.heads),
            (self.key, self.key_heads),
            (self.value, self.key_heads),
        )
        split = (layer(normed).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in layers)
        query, key, value = split
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


def llama_layer(scale: float = CPU_SCALE) -> Workload:
    """A layer of Llama 3 8B (Dubey et al., 2024): 218 M parameters in 9 tensors, 2 x 512 tokens."""
    width = side(4096, scale, LlamaLayer.heads)
    hidden, length = side(14336, scale), share(512, scale)
    build = seeded(lambda: LlamaLayer(width, hidden))
    return Workload("llama_layer", build, normal_batch(2, length, width), mean_square)


class LSTMLanguageModel(nn.Module):
    """An embedding, two LSTM layers and an output projection, all of one width."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of tokens [batch, length]."""
        states, _ = self.layers(self.embedding(tokens))
        return _next_token_loss(self.head(states), tokens)


def lstm(scale: float = CPU_SCALE) -> Workload:
    """The large LSTM of Zaremba et al. (2014): 66 M parameters in 11 tensors, 20 x 35 tokens."""
    width, vocabulary, batch = side(1500, scale), side(10_000, scale), share(20, scale)
    build = seeded(lambda: LSTMLanguageModel(width, vocabulary))
    return Workload("lstm", build, tokens(vocabulary, batch, 35), torch.mean)


def _perceptron(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Dense features through one perceptron; their products with embeddings through another.

    Almost all parameters are in embeddings, few of which a batch touches.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.below = _perceptron((DENSE, 512, 256, FEATURES))
        self.tables = nn.ModuleList(nn.Embedding(rows, FEATURES) for _ in range(TABLES))
        pairs = (TABLES + 1) * TABLES // 2
        self.above = _perceptron((pairs + FEATURES, 512, 256, 1))
        self.register_buffer("pairs", torch.triu_indices(TABLES + 1, TABLES + 1, 1))
        self.pairs: Tensor

    def forward(self, batch: Tensor) -> Tensor:
        """Scores [batch, 1]; the columns are dense features, then a row of each table."""
        dense = self.below(batch[:, :DENSE])
        rows = batch[:, DENSE:].long()
        vectors = [dense, *(table(rows[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        products = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        scores: Tensor = self.above(torch.cat([dense, products], 1))
        return scores


def _dlrm_batch(rows: int, size: int, rank: int, step: int) -> Tensor:
    generator = data_generator(rank, step)
    dense = torch.randn(size, DENSE, generator=generator)
    # fp32 holds whole numbers up to 2^24 exactly.
    indices = torch.randint(rows, (size, TABLES), generator=generator)
    return torch.cat([dense, indices.float()], 1)


def dlrm(scale: float = CPU_SCALE) -> Workload:
    """After DLRM (Naumov et al., 2019): 26 tables of 40,000 x 64, 67 M parameters, batch 2048."""
    rows = share(40_000, scale)
    batch = partial(_dlrm_batch, rows, share(2048, scale))
    return Workload("dlrm", seeded(lambda: DLRM(rows)), batch, mean_square)
