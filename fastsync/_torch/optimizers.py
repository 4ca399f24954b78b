"""Private state of optimizers, and the hooks around their steps."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["InnermostHooks", "first_state"]


class InnermostHooks:
    """Two hooks of one optimizer that run closer to its step than all others.

    Args:
        before: called as `register_step_pre_hook` says, after all others.
        after: called as `register_step_post_hook` says, before all others.
        within: called before a step of another optimizer that has the same hooks: of a proxy,
            whose `step` calls that of its base class, for which torch calls hooks, too. It gets the
            other hooks that torch calls then.
    """

    def __init__(
        self,
        before: Callable[..., Any],
        after: Callable[..., None],
        within: Callable[[list[Callable[..., Any]]], None],
    ) -> None:
        self._before, self._after = _Hook(before, within), _Hook(after)
        self._ids = (-1, -1)

    def place(self, optimizer: Optimizer) -> None:
        """Move them to their places; torch must not be calling hooks of this optimizer.

        The last optimizer that was given is the only one whose steps call them.
        """
        pre = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        post = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
        before, after = self._ids
        if pre.get(before) is not self._before or post.get(after) is not self._after:
            self._before.optimizer = self._after.optimizer = weakref.ref(optimizer)
            before = optimizer.register_step_pre_hook(self._before).id
            after = optimizer.register_step_post_hook(self._after).id
            self._ids = (before, after)
        pre.move_to_end(before)
        post.move_to_end(after, last=False)


class _Hook:
    """One of a pair of innermost hooks."""

    def __init__(
        self,
        call: Callable[..., Any],
        within: Callable[[list[Callable[..., Any]]], None] = lambda hooks: None,
    ) -> None:
        self._call, self._within = call, within
        self.optimizer: weakref.ref[Optimizer] | None = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.optimizer is not None and self.optimizer() is optimizer:
            return self._call(optimizer, args, kwargs)
        pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        hooks = [*pre.values(), *post.values()]
        self._within([hook for hook in hooks if not isinstance(hook, _Hook)])
        return None


def first_state(
    optimizer: Optimizer, groups: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, dict[str, Any]]:
    """Return, by name, the state that a first step makes.

    One of the same class and settings, without the user's hooks, steps on zeros: the optimizer and
    its parameters stay as they are.

    Args:
        groups: gradients of zero, by name, for each group of the optimizer.
    """
    params: dict[str, nn.Parameter] = {}
    settings = []
    for group, gradients in zip(optimizer.param_groups, groups, strict=True):
        for name, gradient in gradients.items():
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            params[name] = nn.Parameter(torch.zeros_like(dense))
            params[name].grad = gradient
        settings.append({**group, "params": [params[name] for name in gradients]})
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(
        optimizer.__dict__,
        state=state,
        param_groups=settings,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    step = type(optimizer).step
    # As the class makes it: hooks of all optimizers are not to hear of this one.
    getattr(step, "__wrapped__", step)(trial) if getattr(step, "hooked", False) else step(trial)
    return {name: state[param] for name, param in params.items() if param in state}
