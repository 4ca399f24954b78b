"""Optimizer states that were loaded from elsewhere: each rank keeps its share of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fastsync._torch import local_of, spec_of
from fastsync.fsdp.sharded_param import ShardedParam
from fastsync.reducer.optimizer_hooks import is_elementwise, params_of


class LoadedStates:
    """The optimizers of one model, whose states are looked at after each load_state_dict()."""

    def __init__(self) -> None:
        # Loading gives an optimizer another dict.
        self._known: WeakKeyDictionary[Optimizer, object] = WeakKeyDictionary()

    def shard(self, optimizer: Optimizer, params: Sequence[ShardedParam]) -> None:
        """Cut the state of whole parameters, as an unsharded run saves it, to this rank's share.

        Args:
            optimizer: about to step.
            params: of the model.

        Raises:
            ValueError: a state is neither that of a whole parameter nor of this rank's share.
        """
        if self._known.get(optimizer) is optimizer.state:
            return
        held = set(map(id, params_of(optimizer)))
        for param in params:
            state = optimizer.state.get(param.sharded)
            if state and id(param.sharded) in held:
                _shard(state, param)
                if is_elementwise(optimizer):
                    _check(optimizer, state, param)
        self._known[optimizer] = optimizer.state


def _tensors(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return those of a parameter's sizes; scalars count steps."""
    return [(n, v) for n, v in state.items() if isinstance(v, torch.Tensor) and v.ndim]


@torch.no_grad()
def _shard(state: dict[str, Any], param: ShardedParam) -> None:
    tensors = _tensors(state)
    # An optimizer of another kind may keep a whole tensor beside those of its shares.
    if any(isinstance(value, DTensor) for _, value in tensors):
        return
    for name, value in tensors:
        if param.is_of_unsharded_size(value):
            share = torch.empty(param.local.shape, dtype=value.dtype, device=param.local.device)
            state[name] = param.as_dtensor(share.copy_(param.share_of(value)))


def _check(optimizer: Optimizer, state: dict[str, Any], param: ShardedParam) -> None:
    spec, local = spec_of(param.sharded), param.local
    for name, value in _tensors(state):
        if not isinstance(value, DTensor):
            if value.shape != local.shape:
                raise ValueError(_WRONG.format(*_words(optimizer, name, value, param)))
            continue
        found = spec_of(value)
        alike = (found.mesh, found.placements) == (spec.mesh, spec.placements)
        if not alike or value.shape != param.sharded.shape or local_of(value).shape != local.shape:
            raise ValueError(_WRONG.format(*_words(optimizer, name, value, param)))
        if found.mesh is not spec.mesh:  # as after torch.load()
            state[name] = param.as_dtensor(local_of(value))


def _words(
    optimizer: Optimizer, name: str, value: torch.Tensor, param: ShardedParam
) -> tuple[str, str, str, str, int, str]:
    is_local = not isinstance(value, DTensor)
    held = "" if is_local else f", of which this rank has {tuple(local_of(value).shape)},"
    sizes = f"{tuple(value.shape)}{held}"
    wanted = f"{tuple(param.sharded.shape)}"
    return name, type(optimizer).__name__, param.name, sizes, param.place.world, wanted


_WRONG = (
    "the state {0!r} that this {1} has for parameter {2!r} has sizes {3} and is not that of {4} "
    "ranks which share {5}. optimizer.load_state_dict() takes the state that this number of ranks "
    "has saved, or that of an unsharded model. For a state of another number of ranks use "
    "torch.distributed.checkpoint.save() and load() with the functions of "
    "torch.distributed.checkpoint.state_dict"
)
