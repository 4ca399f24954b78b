"""A transformer of so many parameters, for plans without a model.

Its layers are as wide as those of published language models: about 102 elements for each of their
number (Llama: 32 of 4,096, 80 of 8,192), with 12 h² parameters each. A layer's arithmetic is 2
operations per parameter and token in the forward and 4 in the backward (Kaplan et al., "Scaling
laws", 2020); it keeps 34 h bytes per token for the backward (Korthikanti et al., "Reducing
activation recomputation", 2022, without what attention's fused kernels do not keep).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fastsync.planner.record import Allocations, Mark, Record, TracedParam

_WIDTH_PER_LAYER = 102
_PER_LAYER = 4  # parameters of a layer: attention in and out, and the two of the feed-forward layer
_KEPT_PER_TOKEN = 34


def transformer_of(
    numel: int, dtype: torch.dtype, batch: Sequence[int], checkpointing: bool = False
) -> Record:
    """Return a record as tracing such a model would make it, coarsely.

    Args:
        batch: samples, and tokens of each.
    """
    layers = max(1, round((numel / (12 * _WIDTH_PER_LAYER**2)) ** (1 / 3)))
    width = max(1, round(math.sqrt(numel / (12 * layers))))
    sizes = [numel * n // layers for n in range(layers + 1)]
    params, marks = [], []
    tokens = math.prod(batch)
    kept = float(_KEPT_PER_TOKEN * width * tokens)
    at_ends = float(2 * width * tokens)
    for layer in range(layers):
        size = sizes[layer + 1] - sizes[layer]
        marks.append(Mark("enter", layer + 1))
        marks.append(Mark("op", work=2.0 * size * tokens))
        marks.append(Mark("alloc", layer, at_ends if checkpointing else kept))
        marks.append(Mark("leave", layer + 1))
        for part in range(_PER_LAYER):
            own = size * (part + 1) // _PER_LAYER - size * part // _PER_LAYER
            name = f"layer {layer}, part {part}"
            params.append(TracedParam(name, (own,), dtype, layer + 1))
    marks.append(Mark("backward"))
    for layer in reversed(range(layers)):
        marks.append(Mark("return", layer + 1))
        if checkpointing:
            marks.append(Mark("alloc", layers + layer, kept))
            marks.append(Mark("op", work=2.0 * (sizes[layer + 1] - sizes[layer]) * tokens))
        for part in reversed(range(_PER_LAYER)):
            index = _PER_LAYER * layer + part
            marks.append(Mark("op", work=4.0 * params[index].numel * tokens))
            marks.append(Mark("grad", index, float(params[index].nbytes)))
        marks.append(Mark("free", layer))
        marks += [Mark("free", layers + layer)] if checkpointing else []
        marks.append(Mark("through", layer + 1))
    name = f"{numel / 1e9:g} B parameters in {layers} layers of {width}"
    inputs = 8 * tokens
    return Record(name, tuple(params), 0, 0, inputs, batch[0], tokens, tuple(marks), layers)


def adam_by_formula(sizes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Allocations:
    """Return Adam's memory with both moments in fp32, fused: no workspace."""
    numel = sum(math.prod(shape) for shape, _ in sizes)
    narrow = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)
    return Allocations(8 * numel, 0, 3.0 * narrow + 16.0 * numel)
