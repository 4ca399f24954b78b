"""A small byte-level GPT: pre-norm transformer decoder, trained to predict the next byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.data import VOCABULARY


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT.

    Attributes:
        length: the longest context in bytes.
        recent: how many of the latest bytes each position sees before any attention.
    """

    width: int = 128
    heads: int = 4
    layers: int = 4
    length: int = 64
    recent: int = 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and around a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        perceived: Tensor = x + self.mlp(self.norm2(x))
        return perceived


class GPT(nn.Module):
    """Calling it gives the loss; `logits` and `generate` are for using it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.recent = nn.ModuleList(
            nn.Embedding(VOCABULARY, shape.width) for _ in range(shape.recent)
        )
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length, 256] for tokens [batch, length]."""
        length = tokens.shape[1]
        x = self.positions(torch.arange(length, device=tokens.device)).expand(len(tokens), -1, -1)
        for back, embedding in enumerate(self.recent):
            # A short memory in the embedding: small models learn spelling far sooner with it.
            x = x + F.pad(embedding(tokens), (0, 0, back, 0))[:, :length]
        result: Tensor = self.head(self.norm(self.blocks(x)))
        return result

    def forward(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of windows [batch, length + 1]."""
        logits = self.logits(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float, seed: int = 0) -> bytes:
        """Continue `prompt` by `count` bytes; temperature 0 always takes the likeliest byte."""
        device = self.head.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(count):
            context = torch.tensor([text[-self.shape.length :]], device=device)
            logits = self.logits(context)[0, -1].float().cpu()
            if temperature == 0:
                text.append(int(logits.argmax()))
                continue
            chances = torch.softmax(logits / temperature, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text[len(prompt) :])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(seed: int = 0, shape: Shape | None = None) -> GPT:
    """Return a new GPT, the same at every call with the same seed."""
    torch.manual_seed(seed)
    return GPT(shape or Shape())
