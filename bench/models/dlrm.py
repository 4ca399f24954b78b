"""A recommendation model: almost all parameters are in embeddings, few of which a batch touches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.models.workload import (
    CPU_SCALE,
    WEIGHT_SEED,
    Workload,
    data_generator,
    mean_square,
    share,
)

TABLES = 26
DENSE = 13
FEATURES = 64


def _perceptron(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Dense features through one perceptron; their products with embeddings through another."""

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__()
        self.below = _perceptron((DENSE, 512, 256, FEATURES))
        self.tables = nn.ModuleList(
            nn.Embedding(rows, FEATURES, sparse=sparse) for _ in range(TABLES)
        )
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


def _batch(rows: int, size: int, rank: int, step: int) -> Tensor:
    generator = data_generator(rank, step)
    dense = torch.randn(size, DENSE, generator=generator)
    # fp32 holds whole numbers up to 2^24 exactly.
    indices = torch.randint(rows, (size, TABLES), generator=generator)
    return torch.cat([dense, indices.float()], 1)


def dlrm(scale: float = CPU_SCALE, sparse: bool = False) -> Workload:
    """After DLRM (Naumov et al., 2019): 26 tables of 40,000 x 64, 67 M parameters, batch 2048."""
    rows, size = share(40_000, scale), share(2048, scale)

    def build() -> nn.Module:
        torch.manual_seed(WEIGHT_SEED)
        return DLRM(rows, sparse)

    name = "dlrm_sparse" if sparse else "dlrm"
    return Workload(name, build, partial(_batch, rows, size), mean_square, sparse)


def dlrm_sparse(scale: float = CPU_SCALE) -> Workload:
    """The same with sparse gradients of the embeddings."""
    return dlrm(scale, sparse=True)
