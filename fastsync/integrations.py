"""FastDDP in training libraries that build their own DistributedDataParallel.

Accelerate, and with it the Trainer of Transformers, names the class it wraps models in::

    with fastsync.integrations.in_place_of_ddp(wire="bf16"):
        model, optimizer = accelerator.prepare(model, optimizer)

Lightning asks its strategy::

    trainer = lightning.Trainer(strategy=fastsync.integrations.FastDDPStrategy(wire="bf16"))

None of these libraries is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastsync.ddp.fast_ddp import FastDDP
from fastsync.replacing import configured

__all__ = ["in_place_of_ddp", "whole_state"]


@contextmanager
def in_place_of_ddp(**options: Any) -> Iterator[type[FastDDP]]:
    """Replace `torch.nn.parallel.DistributedDataParallel` by FastDDP within the context.

    Meant for libraries that offer no other way to choose the class. Models that were wrapped
    inside stay FastDDPs; code that has imported the class by its name still builds DDP.

    Args:
        options: arguments of FastDDP; they win over those that the library passes.
    """
    replacement = configured(options) if options else FastDDP
    former = nn.parallel.DistributedDataParallel
    nn.parallel.DistributedDataParallel = replacement  # type: ignore[misc]
    try:
        yield replacement
    finally:
        nn.parallel.DistributedDataParallel = former  # type: ignore[misc]


@contextmanager
def whole_state(optimizer: Optimizer) -> Iterator[None]:
    """Make each `optimizer.state_dict()` within return what it was when this was entered.

    Every rank enters it, and holds the whole state until it leaves.

    Args:
        optimizer: of parameters of a `FastDDP(zero=1)` or 2; nothing changes for any other.
    """
    state = optimizer.state_dict()
    optimizer.state_dict = lambda: state  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.state_dict


@cache
def _lightning_strategy() -> Any:
    try:
        from lightning.pytorch.strategies import DDPStrategy
    except ModuleNotFoundError:
        from pytorch_lightning.strategies import DDPStrategy

    class FastDDPStrategy(DDPStrategy):  # type: ignore[misc]
        """Lightning's DDPStrategy with FastDDP; takes the arguments of both."""

        __qualname__ = "FastDDPStrategy"

        def _setup_model(self, model: nn.Module) -> FastDDP:
            return FastDDP(model, self.determine_ddp_device_ids(), **self._ddp_kwargs)

    return FastDDPStrategy


def __getattr__(name: str) -> Any:
    if name == "FastDDPStrategy":
        return _lightning_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
