"""Language models: a GPT-2 and an LSTM. Their output is the loss of predicting the next token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.workload import (
    CPU_SCALE,
    WEIGHT_SEED,
    Workload,
    data_generator,
    mean_square,
    normal_batch,
    share,
    side,
)


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _tokens(vocabulary: int, batch: int, length: int) -> Callable[[int, int], Tensor]:
    return lambda rank, step: torch.randint(
        vocabulary, (batch, length), generator=data_generator(rank, step)
    )


class CausalBlock(nn.Module):
    """Pre-norm causal self-attention and a GELU layer of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.shrink(functional.gelu(self.grow(self.norm2(x)), approximate="tanh"))
        return x


class GPT2(nn.Module):
    """Learned positions, 12 blocks, and an output projection tied to the token embedding."""

    heads = 12

    def __init__(self, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, self.heads) for _ in range(12)))
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

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return GPT2(width, vocabulary, length)

    return Workload("gpt2", build, _tokens(vocabulary, batch, length), torch.mean)


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
        query, key, value = (
            layer(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.query, self.heads),
                (self.key, self.key_heads),
                (self.value, self.key_heads),
            )
        )
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

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return LlamaLayer(width, hidden)

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

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return LSTMLanguageModel(width, vocabulary)

    return Workload("lstm", build, _tokens(vocabulary, batch, 35), torch.mean)
