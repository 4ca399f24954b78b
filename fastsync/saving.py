"""Code that asks one rank for the optimizer's state, which `zero` spreads over all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from fastsync.ddp import FastDDP

__all__ = ["have_trainer_collect", "whole_state"]


@contextmanager
def whole_state(optimizer: Optimizer) -> Iterator[None]:
    """While it is entered, any rank may call `optimizer.state_dict()`, and others need not.

    For code that saves on one rank and cannot be changed. Collective: every rank enters it, and
    holds the whole state until it leaves.

    Args:
        optimizer: of parameters of a `FastDDP(zero=1)` or 2; nothing changes for any other.
    """
    state = optimizer.state_dict()
    optimizer.state_dict = lambda: state  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.state_dict


def have_trainer_collect() -> None:
    """Has the Trainer of Transformers, where it is imported, collect the state before it saves.

    It asks only the rank that writes.
    """
    kind: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    save = getattr(kind, "_save_optimizer_and_scheduler", None)
    if save is None or hasattr(save, "collects"):
        return

    @wraps(save)
    def collect_and_save(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(trainer.model_wrapped, FastDDP):
            return save(trainer, *args, **kwargs)
        with whole_state(trainer.optimizer):
            return save(trainer, *args, **kwargs)

    collect_and_save.collects = True  # type: ignore[attr-defined]
    kind._save_optimizer_and_scheduler = collect_and_save
