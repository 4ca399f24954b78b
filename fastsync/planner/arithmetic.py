"""The formulas of ZeRO alone, for so many parameters on so many ranks; no model, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.planner.held import Held
from fastsync.planner.strategy import Strategy, named

__all__ = ["HeldRow", "held_rows"]


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
        rows.append(HeldRow(strategy, scaled, _sent(numel * held.gradient, strategy)))
    return rows


def _sent(nbytes: float, strategy: Strategy) -> float:
    """2 for an all-reduce, or a reduce-scatter and an all-gather; 3 where both passes gather."""
    share = (strategy.shards - 1) / strategy.shards
    sent = (3 if strategy.stage == 3 else 2) * share * nbytes
    if strategy.hybrid:
        groups = strategy.world // strategy.shards
        sent += 2 * (groups - 1) / groups * nbytes / strategy.shards
    return sent
