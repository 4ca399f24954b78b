"""Models of real size: image classifiers and language models."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.classic import residual_network
from bench.models.workload import CPU_SCALE, normal_batch, seeded, share, side, tokens
from examples.common.training import Workload
from examples.gpt import Block, Shape

CLASSES, IMAGE, BATCH = 1000, 224, 32


def resnet50(scale: float = CPU_SCALE) -> Workload:
    """ResNet-50 (He et al., 2015): 25.6 M parameters in 161 tensors, on 32 images of 224 x 224."""
    first = side(64, scale)
    blocks = []
    for stage, count in enumerate((3, 4, 6, 3)):
        width = first * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            blocks.append(((width, 1, 1), (width, 3, stride), (4 * width, 1, 1)))
    make = lambda: residual_network(first, nn.MaxPool2d(3, 2, 1), blocks, CLASSES)  # noqa: E731
    return seeded("resnet50", make, normal_batch(share(BATCH, scale), 3, IMAGE, IMAGE))


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
        """Return the loss of tokens [batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        logits = functional.linear(x, self.tokens.weight)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt2(scale: float = CPU_SCALE) -> Workload:
    """GPT-2 (Radford et al., 2019), 124 M parameters in 148 tensors, on 8 x 1024 tokens."""
    width, vocabulary = side(768, scale, GPT2.heads), side(50257, scale)
    batch, length = share(8, scale), side(1024, scale)
    make = partial(GPT2, width, vocabulary, length)
    return seeded("gpt2", make, tokens(vocabulary, batch, length), torch.mean)


def block(scale: float = CPU_SCALE) -> Workload:
    """Return a block of GPT-2, 7.1 M parameters in 12 tensors: a bucket of 28 MB."""
    width = side(768, scale, GPT2.heads)
    return seeded("block", lambda: Block(Shape(width, GPT2.heads)), normal_batch(8, 64, width))


class LlamaLayer(nn.Module):
    """RMSNorm, causal attention with 32 query heads on 8 keys, and a gated SiLU layer."""

    heads, key_heads = 32, 8
    split = (heads, key_heads, key_heads)  # query, key and value

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
        query, key, value = (
            layer(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in zip((self.query, self.key, self.value), self.split, strict=True)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


def llama_layer(scale: float = CPU_SCALE) -> Workload:
    """Return a layer of Llama 3 8B (Dubey et al., 2024), 218 M parameters in 9 tensors: 2 x 512
    tokens."""
    width = side(4096, scale, LlamaLayer.heads)
    hidden, length = side(14336, scale), share(512, scale)
    return seeded("llama_layer", partial(LlamaLayer, width, hidden), normal_batch(2, length, width))
