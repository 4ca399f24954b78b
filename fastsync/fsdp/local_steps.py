"""Steps of optimizers on local tensors instead of DTensors.

DTensor looks up how to spread each operation over the ranks, in Python. An optimizer calls about
ten per parameter, which takes longer than the arithmetic where parameters are small. Where an
update concerns each element alone, shares step just as well as themselves: with the same
operations, so with the same bits.

A proxy of the same class, settings and state makes the step (fastsync/reducer/optimizer_hooks.py).
The state that it makes becomes DTensors of the parameter's placement, as the optimizer itself would
have made them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fastsync._torch import local_of, make_dtensor, spec_of, with_dtype
from fastsync.reducer.optimizer_hooks import (
    Arguments,
    is_elementwise,
    optimizer_proxy,
    params_of,
    with_loss,
)


class _LocalState(defaultdict[torch.Tensor, dict[str, Any]]):
    """An optimizer's state, some of it by local tensors.

    Shared by the stand-ins of one step, of which there are several where parameters of several
    models are in one optimizer.
    """

    @classmethod
    def of(cls, optimizer: Optimizer) -> _LocalState:
        state = optimizer.state
        return state if isinstance(state, cls) else cls(dict, state)


class LocalSteps:
    """Steps of any optimizer on parameters of one model."""

    def __init__(self) -> None:
        self._locals: dict[torch.Tensor, torch.Tensor] = {}  # by parameter, while one is made
        self._state: _LocalState | None = None

    def before(
        self, optimizer: Optimizer, args: Arguments, params: Iterable[torch.Tensor]
    ) -> Arguments | None:
        """Return the arguments for `step`; None: those that it was called with.

        Args:
            params: parameters of the model.
        """
        self._locals, self._state = {}, None
        ours = set(map(id, params)) & set(map(id, params_of(optimizer)))
        if not ours or not _may_have_proxy(optimizer):
            return None
        args = with_loss(args)
        mine = [p for p in params_of(args[0]) if id(p) in ours]
        if not all(map(_steps_alone, mine)):
            return args
        self._locals = {param: _with_gradient(param) for param in mine}
        groups = [
            {**group, "params": [self._locals.get(p, p) for p in group["params"]]}
            for group in args[0].param_groups
        ]
        proxy = optimizer_proxy(args[0], groups)
        self._state = proxy.state = _LocalState.of(args[0])
        for param, local in self._locals.items():
            if param in optimizer.state:
                kept = optimizer.state[param]
                self._state[local] = {name: _local(value) for name, value in kept.items()}
        return (proxy, *args[1:])

    def after(self, optimizer: Optimizer) -> None:
        """Store the state that the step has made."""
        state, self._state = self._state, None
        if state is None:
            return
        for param, local in self._locals.items():
            if local in state:
                _keep(optimizer, param, local, state.pop(local))
        self._locals.clear()
        for param in params_of(optimizer):  # of no model
            if param in state and param not in optimizer.state:
                optimizer.state[param] = state[param]


def _may_have_proxy(optimizer: Optimizer) -> bool:
    """Return whether a proxy may make the step: not where something adds to it."""
    asks = ("grad_scale", "found_inf")  # a GradScaler leaves its part to the optimizer
    return (
        is_elementwise(optimizer)
        and not any(getattr(optimizer, name, None) is not None for name in asks)
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not torch.compiler.is_compiling()
    )


def _steps_alone(param: torch.Tensor) -> bool:
    """Return whether a parameter's gradient lies as it does, in memory of no other tensor class."""
    if not isinstance(param, DTensor) or type(local_of(param)) is not torch.Tensor:
        return False
    grad = param.grad
    if grad is None:
        return True
    return isinstance(grad, DTensor) and (
        grad._spec is param._spec
        or (grad.device_mesh == param.device_mesh and grad.placements == param.placements)
    )


def _with_gradient(param: torch.Tensor) -> torch.Tensor:
    local = local_of(param).detach()
    if param.grad is not None:
        local.grad = local_of(param.grad)
    return local


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _keep(
    optimizer: Optimizer, param: torch.Tensor, local: torch.Tensor, made: dict[str, Any]
) -> None:
    """Store the state of `local` in `optimizer` as that of `param`."""
    held = optimizer.state[param]
    for name, value in made.items():
        if name in held and _local(held[name]) is value:
            continue
        if isinstance(value, torch.Tensor) and value.shape == local.shape and value.ndim:
            value = make_dtensor(value, with_dtype(spec_of(param), value.dtype))
        held[name] = value
