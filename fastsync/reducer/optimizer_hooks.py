"""Watchers between `optimizer.step()` and the optimizer, which see steps and may change what they
step on.

Torch calls hooks before and after every step of every optimizer. One that is called before may
replace the arguments of `step`, the optimizer itself among them: by a proxy.

[Note: inside the hooks of a script]
Hooks of a script may write to parameters, gradients and settings. What they write before a step has
to count in it, and after a step they have to find what it has made, on every rank. So a watcher
that replaces a step is called last of all hooks before it and first of all hooks after it. Torch
calls hooks of all optimizers first, then those of this one, and after the step the other way
around. A hook of all optimizers, which runs before every step, therefore moves a pair of hooks of
this optimizer to the innermost place, wherever the script has put its own since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastsync._torch import InnermostHooks
from fastsync.reducer.weak_calls import weakly

# Of a call of `step`, self first.
Arguments = tuple[Any, ...]
# Each element's update depends on that element's weight, gradient and state alone.
_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


class StepWatcher:
    """Object that is asked before each step of any optimizer, and called after it."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that a step begins; some hooks of the script are still to come."""

    def replaces(self, optimizer: Optimizer) -> bool:
        """Return whether `replace_step` and `end_step` are to be called for this optimizer."""
        return False

    def replace_step(self, optimizer: Optimizer, args: Arguments) -> Arguments | None:
        """Replace a step, after every hook that the script registered to run before it.

        Args:
            args: perhaps with another watcher's proxy.

        Returns:
            What to call `step` with instead; None: with these.
        """
        return None

    def end_step(self, optimizer: Optimizer) -> None:
        """End a step, before every hook that the script registered to run after it."""

    def within_step(self, hooks: Sequence[Callable[..., Any]]) -> None:
        """Handle a proxy's call of its base class's `step`.

        torch then calls these hooks of the script once more, before `end_step`.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that the step has been made, or what stood in for it."""


def watch_steps(watcher: StepWatcher) -> Callable[[], None]:
    """Let `watcher` see all steps as long as it lives, after the watchers registered before it.

    Returns:
        A function that ends this. Do not call it while torch goes through the hooks of a step.
    """
    me = weakref.ref(watcher)
    inner: weakref.WeakKeyDictionary[Optimizer, InnermostHooks] = weakref.WeakKeyDictionary()
    innermost = (
        partial(_replaced, weakly(watcher.replace_step)),
        _of_optimizer(weakly(watcher.end_step)),
        weakly(watcher.within_step),
    )

    def before(optimizer: Optimizer, *_: object) -> None:
        alive = me()
        if alive is None:
            return
        alive.before_step(optimizer)
        if alive.replaces(optimizer):
            if optimizer not in inner:
                inner[optimizer] = InnermostHooks(*innermost)
            inner[optimizer].place(optimizer)

    hooks = (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(_of_optimizer(weakly(watcher.after_step))),
    )

    # Not where the watcher ends: a garbage collection may end it inside a step, while torch goes
    # through these hooks. One whose watcher is gone does nothing.
    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop


def _of_optimizer(call: Callable[[Optimizer], None]) -> Callable[..., None]:
    """Return a hook that passes the optimizer alone."""
    return lambda optimizer, *_: call(optimizer)


def _replaced(
    replace: Callable[[Optimizer, Arguments], Arguments | None],
    optimizer: Optimizer,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    args = tuple(args)
    if "closure" in kwargs:
        args, kwargs = (*args, kwargs["closure"]), {**kwargs}
        del kwargs["closure"]
    changed = replace(optimizer, args)
    return None if changed is None else (changed, kwargs)


def with_loss(args: Arguments) -> Arguments:
    """Call a closure now: it computes gradients, which are to be seen before the step."""
    if len(args) < 2 or not callable(args[1]):
        return args
    with torch.enable_grad():
        loss = args[1]()
    return (args[0], lambda: loss, *args[2:])


def known_optimizers(names: Sequence[str]) -> tuple[type, ...]:
    """Return the optimizers of these names that this torch has: versions differ."""
    return tuple(getattr(optim, name) for name in names if hasattr(optim, name))


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether any piece of a parameter may step by itself: a class of torch, not one
    derived.
    """
    return type(optimizer) in known_optimizers(_ELEMENTWISE)


def params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that it steps on."""
    for group in optimizer.param_groups:
        yield from group["params"]


def optimizer_proxy(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class, settings and state, with other groups.

    The optimizer itself stays as it is, even where the step raises.
    """
    proxy: Optimizer = object.__new__(type(optimizer))
    proxy.__dict__.update(optimizer.__dict__, param_groups=list(groups))
    return proxy


def plain_step(optimizer: Optimizer) -> None:
    """Make a step as its class does, without any hooks.

    Args:
        optimizer: of a class of torch, whose `step` torch has wrapped to call hooks.
    """
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
