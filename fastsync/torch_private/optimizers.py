"""What optimizers keep."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["first_state"]


def first_state(
    optimizer: Optimizer, groups: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, dict[str, Any]]:
    """By name, the state that a first step makes.

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
    type(optimizer).step(trial)
    return {name: state[param] for name, param in params.items() if param in state}
