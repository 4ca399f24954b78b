"""Steps of a GradScaler with groups: all ranks leave out the same ones."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fastsync._torch import on_unscaled
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import watched
from fastsync.reducer.optimizer_hooks import params_of

__all__ = ["ScalerGuard"]


class ScalerGuard:
    """Tell all ranks of an overflow in the gradients of a group, which its ranks alone have.

    Args:
        engine: engine whose policy has groups.
    """

    def __init__(self, engine: Engine) -> None:
        self._group = engine.group
        self._ours = frozenset(id(param.tensor) for param in engine.params)
        on_unscaled(self.share)

    def share(self, optimizer: Optimizer, found: torch.Tensor) -> None:
        """Let `found` say whether any rank has found infinity. Collective."""
        if any(id(param) in self._ours for param in params_of(optimizer)):
            how = dist.ReduceOp.MAX
            start = partial(dist.all_reduce, found, how, group=self._group, async_op=True)
            watched(self._group, "the search for infinities", start)
