"""The state of a module under the names that torch's tests ask for it: the same facts.

Torch's tests look into `fully_shard.state(module)` and `module._get_fsdp_state()`. What they look
for there, fastsync knows by other names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import fastsync
from fastsync.fsdp.dtype_shard import DtypeShard
from fastsync.fsdp.fully_shard import _managed, _walk
from fastsync.fsdp.module_hooks import State, _UnitEnd, state_of
from fastsync.fsdp.param_group import Unit
from fastsync.fsdp.sharded_param import ShardedParam

__all__ = ["PEEKED", "let_modules_peek", "peek"]


class _Group:
    """A unit as an FSDPParamGroup."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def is_unsharded(self) -> bool:
        return self._unit.is_whole

    @property
    def _orig_dtype(self) -> torch.dtype:
        return self._trained().dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._trained().reduce

    def _trained(self) -> DtypeShard:
        """The dtype shard that can get gradients."""
        (found,) = (s for s in self._unit.dtype_shards if s.dtype.is_floating_point)
        return found

    @property
    def _module_fqn(self) -> str:
        return self._unit.name

    @property
    def fsdp_params(self) -> list[_Param]:
        return [_Param(member) for member in self._unit.params]


class _Param:
    """A member as an FSDPParam."""

    def __init__(self, member: ShardedParam) -> None:
        self._member = member

    @property
    def _param_fqn(self) -> str:
        return self._member.name


class _State:
    """A state as an FSDPState."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and other._state is self._state

    def __hash__(self) -> int:
        return id(self._state)

    def _lazy_init(self) -> None:
        self._state.become_root()

    @property
    def _is_root(self) -> bool | None:
        return self._state.is_root

    @property
    def _fsdp_param_group(self) -> _Group | None:
        return None if self._state.unit is None else _Group(self._state.unit)

    @property
    def _state_ctx(self) -> _State:
        return self

    @property
    def all_states(self) -> list[_State]:
        return [_State(state) for state in self._state.context.states]

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        alone = len(self._state.modules) == 1
        return set() if alone else self._state._missing


@contextlib.contextmanager
def _patched_end(new: Callable[..., object]) -> Iterator[None]:
    """Run another function where a unit's backward ends."""
    end: Any = _UnitEnd
    before = end.__dict__["backward"]
    end.backward = staticmethod(new)
    try:
        yield
    finally:
        end.backward = before


def _managed_states(
    modules: list[nn.Module],
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    params, buffers = _managed(modules, set())
    return list(params.values()), buffers


def peek(module: nn.Module) -> Any:
    """In place of `fully_shard.state`."""
    found = state_of(module)
    return None if found is None else _State(found)


def let_modules_peek() -> None:
    """Give modules torch's internal method."""
    owner: Any = fastsync.FSDPModule
    owner._get_fsdp_state = peek


# What takes the place of names of torch's internals.
PEEKED: dict[str, Any] = {
    "_get_managed_modules": lambda modules: list(_walk(modules)),
    "_get_managed_states": _managed_states,
    "RegisterPostBackwardFunction": _UnitEnd,
    "patch_register_post_backward_hook_backward": _patched_end,
}
