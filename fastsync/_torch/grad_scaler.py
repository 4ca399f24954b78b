"""What a GradScaler does, which no hook of the optimizer sees."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

__all__ = ["on_scaled_skips", "on_unscaled"]


Skipped = Callable[[Optimizer], None]
Unscaled = Callable[[Optimizer, torch.Tensor], None]
Watcher = TypeVar("Watcher", bound=Callable[..., None])


class _Watchers(Generic[Watcher]):
    """Bound methods, as long as their objects live."""

    def __init__(self) -> None:
        self._known: list[weakref.WeakMethod[Watcher]] = []

    def add(self, watcher: Watcher) -> None:
        self._known = [known for known in self._known if known() is not None]
        self._known.append(weakref.WeakMethod(watcher))

    def __iter__(self) -> Iterator[Watcher]:
        for known in self._known:
            if (watcher := known()) is not None:
                yield watcher


def on_scaled_skips(watcher: Skipped) -> None:
    """Call a bound method whenever `GradScaler.step(optimizer)` makes no step, as long as its
    object lives.
    """
    _skip_watchers().add(watcher)


def on_unscaled(watcher: Unscaled) -> None:
    """Call a bound method whenever a GradScaler has looked for infinity in an optimizer's
    gradients, with what it has found on each device, as long as its object lives.
    """
    _unscale_watchers().add(watcher)


@functools.cache
def _unscale_watchers() -> _Watchers[Unscaled]:
    """Return the watchers of this process's scalers, which call them from the first call on."""
    watchers = _Watchers[Unscaled]()
    plain: Any = GradScaler._unscale_grads_

    @functools.wraps(plain)
    def unscale(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, optimizer, *args, **kwargs)
        for watcher in watchers:
            for flag in found.values():
                watcher(optimizer, flag)
        return found

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    return watchers


@functools.cache
def _skip_watchers() -> _Watchers[Skipped]:
    """Return the watchers of this process's scalers, which call them from the first call on."""
    watchers = _Watchers[Skipped]()
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
                watcher(optimizer)
        return result

    GradScaler.step = step  # type: ignore[method-assign]
    return watchers
