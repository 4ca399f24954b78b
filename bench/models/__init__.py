"""The models that benchmarks train.

Weights are the same on every rank (`build` seeds them); data differ from rank to rank. `scale`
multiplies the number of parameters, and 1 is a model's true size; the default suits two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.models.classic import conv, deep, ops400, small, transformer, wide
from bench.models.known import block, gpt2, llama_layer, resnet50
from bench.models.paced import paced
from examples.common.training import Workload

# What a step on a GPU waits for, by model: the GPU, the host, the network (few tokens, many bytes).
GPU_BOUND, HOST_BOUND, NETWORK_BOUND = "gpt2,resnet50", "small", "llama_layer"

_EVERY: tuple[Callable[..., Workload], ...] = (
    *(small, transformer, wide, deep, conv, resnet50, block, gpt2, llama_layer, ops400, paced),
)
# Each takes `scale` and has a default for it.
WORKLOADS = {make.__name__: make for make in _EVERY}
