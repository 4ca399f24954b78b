"""What is known of a model from its number of parameters alone.

What a rank holds from step to step by the formulas of ZeRO, and a transformer of so many
parameters. Its layers are as wide as those of published language models: about 102 elements for
each of their number (Llama: 32 of 4,096, 80 of 8,192), with 12 h² parameters each. A layer's
arithmetic is 2 operations per parameter and token in the forward and 4 in the backward (Kaplan et
al., "Scaling laws", 2020); it keeps 34 h bytes per token for the backward (Korthikanti et al.,
"Reducing activation recomputation", 2022, without what attention's fused kernels do not keep).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastsync.planner.record import Allocations, Mark, Record, TracedParam
from fastsync.planner.strategy import Strategy, named

__all__ = ["HELD", "Held", "HeldRow", "adam_by_formula", "held_rows", "transformer_of"]

_WIDTH_PER_LAYER = 102
_PER_LAYER = 4  # parameters of a layer: attention in and out, and the two of the feed-forward layer
_KEPT_PER_TOKEN = 34


@dataclass(frozen=True)
class Held:
    """Bytes per parameter: of itself, its gradient, the optimizer's state, and its master weight.

    Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models". A
    common table has 210 GB for stage 2 of 70 billion bf16 parameters on 8 ranks: 2 + 8/8 = 3.00
    bytes each, which leaves out the shard of the gradients. 2 + (2 + 8)/8 = 3.25 make 227.5 GB.
    """

    parameter: float
    gradient: float
    state: float
    master: float = 0.0

    def items(self, stage: int, world: int) -> dict[str, float]:
        """Bytes per parameter on each of `world` ranks, which share what `stage` says."""
        of_state, of_gradient, of_parameter = (1 / world if stage >= s else 1.0 for s in (1, 2, 3))
        return {
            "parameters": self.parameter * of_parameter,
            "gradients": self.gradient * of_gradient,
            "optimizer state": self.state * of_state,
            "master weights": self.master * of_state,
        }

    def per_rank(self, stage: int, world: int) -> float:
        """Bytes per parameter of all items together."""
        return sum(self.items(stage, world).values())


HELD = {
    "fp32": Held(4, 4, 8),
    "bf16, states in fp32": Held(2, 2, 8),
    "bf16, states and master weights in fp32": Held(2, 2, 8, 4),
}


@dataclass(frozen=True)
class HeldRow:
    """Bytes of a rank under one strategy, by item.

    Attributes:
        sent: bytes that a rank sends in a step.
    """

    strategy: Strategy
    items: dict[str, float]
    sent: float

    @property
    def total(self) -> float:
        return sum(self.items.values())


def held_rows(
    numel: int, held: Held, world: int, per_node: int, kinds: Sequence[str]
) -> list[HeldRow]:
    """What a rank holds from step to step; groups of a node share in "hsdp"."""
    rows = []
    for kind in kinds:
        strategy = named(kind, world, per_node)
        if kind == "hsdp" and not strategy.hybrid:
            continue
        items = held.items(strategy.stage, strategy.shards)
        scaled = {name: numel * value for name, value in items.items()}
        # 2 for an all-reduce, or a reduce-scatter and an all-gather; 3 where both passes gather.
        share, nbytes = (strategy.shards - 1) / strategy.shards, numel * held.gradient
        sent = (3 if strategy.stage == 3 else 2) * share * nbytes
        if strategy.hybrid:
            groups = world // strategy.shards
            sent += 2 * (groups - 1) / groups * nbytes / strategy.shards
        rows.append(HeldRow(strategy, scaled, sent))
    return rows


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
            params.append(TracedParam(name, (own,), dtype, own, layer + 1))
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
