"""Weights of the micro-batches of a model whose parameters are sharded."""

from __future__ import annotations

import weakref
import zlib
from typing import cast

import torch
from torch import nn

from fastsync._torch import local_of
from fastsync.fsdp.context import Context
from fastsync.fsdp.errors import RefusedError
from fastsync.fsdp.module_hooks import State, state_of
from fastsync.fsdp.step_records import context_of
from fastsync.reducer.mean_weights import MeanWeights, Number

__all__ = ["Weighted", "weights_of"]


def weights_of(root: nn.Module) -> MeanWeights:
    """Return what weights of a root are given to.

    Raises:
        RuntimeError: it is no root, or has no parameters.
        ValueError: its ranks have no process group in common.
    """
    context = context_of(root)
    if context.weights is None:
        states = (state_of(module) for module in root.modules())
        places = [s.unit.place for s in states if s is not None and s.unit is not None]
        if not places:
            raise RuntimeError("there is nothing to average: fully_shard() found no parameters")
        group = places[0].everybody()
        if group.size() != places[0].ranks:
            raise RefusedError(
                "add_weight() needs a process group of all ranks: a mesh of one dimension, or one "
                "of two that has all ranks of the default group"
            )
        name = zlib.crc32(",".join(name for name, _ in root.named_parameters()).encode())
        me = weakref.ref(context)
        context.weights = MeanWeights(
            group, str(name), places[0].device, lambda: _averages(me()), lambda index: True
        )
    return context.weights


def _averages(context: Context[State] | None) -> list[torch.Tensor | None]:
    """Return this rank's part of each gradient."""
    units = [] if context is None else context.units()
    grads = [member.sharded.grad for unit in units for member in unit.members]
    return [None if grad is None else local_of(grad) for grad in grads]


class Weighted:
    """Methods of a root that weight its micro-batches."""

    def add_weight(self, weight: Number, mean: torch.Tensor | None = None) -> torch.Tensor | None:
        """Give the next micro-batch a weight; see `FastDDP.add_weight`.

        Raises:
            RuntimeError: the module is no root.
            ValueError: it makes no sense, or the ranks have no process group in common.
        """
        weights_of(cast(nn.Module, self)).add(weight)
        return None if mean is None else mean * weight
