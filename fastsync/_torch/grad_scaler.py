"""What a GradScaler does, which no hook of the optimizer sees."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

__all__ = ["on_scaled_skips", "on_unscaled"]


def on_scaled_skips(watcher: Callable[[Optimizer], None]) -> None:
    """Call a bound method whenever `GradScaler.step(optimizer)` makes no step, as long as its
    object lives.
    """
    watchers = _watchers()
    watchers[:] = [known for known in watchers if known() is not None]
    watchers.append(weakref.WeakMethod(watcher))


def on_unscaled(watcher: Callable[[Optimizer, torch.Tensor], None]) -> None:
    """Call a bound method whenever a GradScaler has looked for infinity in an optimizer's
    gradients, with what it has found on each device, as long as its object lives.
    """
    _on_unscaled().append(weakref.WeakMethod(watcher))


@functools.cache
def _on_unscaled() -> list[weakref.WeakMethod[Callable[[Optimizer, torch.Tensor], None]]]:
    watchers: list[weakref.WeakMethod[Callable[[Optimizer, torch.Tensor], None]]] = []
    plain: Any = GradScaler._unscale_grads_

    @functools.wraps(plain)
    def unscale(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, optimizer, *args, **kwargs)
        watchers[:] = [known for known in watchers if known() is not None]
        for watcher in watchers:
            alive = watcher()
            if alive is not None:
                for flag in found.values():
                    alive(optimizer, flag)
        return found

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    return watchers


@functools.cache
def _watchers() -> list[weakref.WeakMethod[Callable[[Optimizer], None]]]:
    """Return the watchers of this process's scalers, which call them from the first call on."""
    watchers: list[weakref.WeakMethod[Callable[[Optimizer], None]]] = []
    plain: Any = GradScaler.step

    @functools.wraps(plain)
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, Optimizer):  # a wrapper of a library
            return plain(self, optimizer, *args, **kwargs)
        steps: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(True))
        try:
            result = plain(self, optimizer, *args, **kwargs)
        finally:
            hook.remove()
        if not steps:
            for watcher in watchers:
                alive = watcher()
                if alive is not None:
                    alive(optimizer)
        return result

    GradScaler.step = step  # type: ignore[method-assign]
    return watchers
