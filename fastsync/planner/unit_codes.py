"""What gradients of stage 3 travel as in a plan."""

from __future__ import annotations

import torch

from fastsync.plan.layout import align_up
from fastsync.plan.policy import UnitWires
from fastsync.planner.record import Record
from fastsync.planner.strategy import Strategy
from fastsync.units.codes import Codes, gradient_codes
from fastsync.wire.formats import Wire

__all__ = ["coded_units", "codes_of"]


def codes_of(strategy: Strategy, gradients: torch.dtype) -> Codes | None:
    """What gradients travel as; None: as they are."""
    wires = UnitWires(Wire(strategy.wire))
    return gradient_codes(wires, strategy.shards, (gradients,), gradients)


def coded_units(record: Record, strategy: Strategy) -> dict[int, float]:
    """Bytes of a rank's codes of each unit's gradients, those that it keeps among them. Empty where
    gradients travel as they are."""
    elements: dict[int, int] = {}
    codes = None
    for param in record.params:
        codes = codes or codes_of(strategy, param.dtype)
        elements[param.unit] = elements.get(param.unit, 0) + param.numel
    if codes is None:
        return {}
    block, ranks, found = codes.block, strategy.shards, {}
    for unit, numel in elements.items():
        chunk = align_up(-(-numel // ranks), block)
        found[unit] = float(ranks * codes.codec.coded_bytes(chunk))
    return found
