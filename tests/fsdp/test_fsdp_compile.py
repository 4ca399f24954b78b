"""torch.compile around units and inside them, beside torch's FSDP2 and beside no compiler."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard as torchs

from fastsync import FastDDP, Zero, fully_shard
from fastsync.testing import run_ranks
from tests.fsdp.fsdp_models import OPTIMIZERS, Block, farthest, whole

WIDTH = 17
HOOKS = 2 * 3  # before and after the forward of each unit


class Chain(nn.Module):
    """Computes between its blocks, too, with parameters that are the root's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(WIDTH), Block(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x * 2))
        x = self.second(x).relu() + 1
        return self.head(x)


def wrapped(shard, model=None):
    model = Chain() if model is None else model
    shard(model.first)
    shard(model.second)
    return shard(model)


def blocks_first(shard, backend):
    """The order of tutorials: each block is compiled, then sharded."""
    model = Chain()
    model.first = torch.compile(model.first, backend=backend)
    model.second = torch.compile(model.second, backend=backend)
    return wrapped(shard, model)


def methods_first(shard, backend):
    model = Chain()
    model.first.compile(backend=backend)
    model.second.compile(backend=backend)
    return wrapped(shard, model)


def methods_later(shard, backend):
    model = wrapped(shard)
    model.first.compile(backend=backend)
    model.second.compile(backend=backend)
    return model


def whole_model(shard, backend):
    return torch.compile(wrapped(shard), backend=backend)


def in_place(shard, backend):
    model = wrapped(shard)
    model.compile(backend=backend)
    return model


def inside_stage(shard, backend):
    return FastDDP(torch.compile(Chain(), backend=backend), zero=Zero(3, units=[Block]))


def around_stage(shard, backend):
    return torch.compile(FastDDP(Chain(), zero=Zero(3, units=[Block])), backend=backend)


def stage_in_place(shard, backend):
    model = FastDDP(Chain(), zero=Zero(3, units=[Block]))
    model.compile(backend=backend)
    return model


WAYS = {
    "blocks, then fully_shard": blocks_first,
    "block.compile(), then fully_shard": methods_first,
    "fully_shard, then block.compile()": methods_later,
    "torch.compile(fully_shard(model))": whole_model,
    "model.compile()": in_place,
}
STAGES = {
    "FastDDP(torch.compile)": inside_stage,
    "torch.compile(FastDDP)": around_stage,
    "FastDDP.compile()": stage_in_place,
}


def train(model, rank):
    """Weights after some steps, of which none but the first compiles anything."""
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False
    return whole(model.parameters())


def compiled(rank, shard, make, backend):
    """Weights, and of how many operations each graph is."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    weights = train(make(shard, counter), rank)
    return weights, sorted(len(graph.graph.nodes) for graph in counter.graphs)


def beside(rank, world, way, backend):
    eager = train(wrapped(fully_shard), rank)
    ours, graphs = compiled(rank, fully_shard, {**WAYS, **STAGES}[way], backend)
    theirs = compiled(rank, torchs, WAYS[way], backend)[1] if way in WAYS else None
    return farthest(ours, eager), graphs, theirs


@pytest.mark.slow(but=("fully_shard, then block.compile()-eager",))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_eager_ones_and_graphs_are_those_of_fsdp2(way, backend):
    for apart, graphs, theirs in run_ranks(beside, 2, way, backend):
        assert apart == 0
        assert 1 <= len(graphs) <= 1 + HOOKS
        assert graphs == theirs, "operations of each graph"


@pytest.mark.slow(but=("FastDDP.compile()-eager",))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", STAGES)
def test_zero3_and_the_compiler(way, backend):
    for apart, graphs, _ in run_ranks(beside, 2, way, backend):
        assert apart == 0
        assert 1 <= len(graphs) <= 1 + HOOKS


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, *STAGES])
def test_weights_of_inductor(way):
    for apart, graphs, _ in run_ranks(beside, 2, way, "inductor", timeout=300):
        assert apart <= 1e-5
        assert graphs
