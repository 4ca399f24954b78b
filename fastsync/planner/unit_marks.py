"""Where a traced step enters and leaves the units that stage 3 gathers.

They are those that FastDDP(zero=3) chooses, and their moments those at which it gathers, frees and
reduces them: see fastsync/units/state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fastsync.planner.record import Mark
from fastsync.torch_private.tracing import tree_leaves, tree_map_only
from fastsync.units.choosing import choose_units

__all__ = ["ROOT", "note_units", "units_of"]

ROOT = 0


def units_of(module: nn.Module) -> list[Sequence[nn.Module]]:
    """The modules of each unit, by its number; the root's is the first."""
    chosen = choose_units(module, None)
    return [[module], *([each] if isinstance(each, nn.Module) else each for each in chosen)]


def note_units(marks: list[Mark], units: Sequence[Sequence[nn.Module]]) -> None:
    """Adds marks whenever a forward or backward enters a unit or is through with it."""
    for number, modules in enumerate(units):
        watch = _Watch(marks, number, modules)
        for module in modules:
            module.register_forward_pre_hook(watch.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(watch.after_forward)


class _Watch:
    """Of one unit, whose modules run one after the other."""

    def __init__(self, marks: list[Mark], number: int, modules: Sequence[nn.Module]) -> None:
        self._marks, self._number, self._modules = marks, number, frozenset(modules)
        self._missing: set[nn.Module] = set()

    def _mark(self, kind: str, *_: object) -> None:
        self._marks.append(Mark(kind, self._number))

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self._missing:
            return args, kwargs
        self._missing = set(self._modules)
        self._mark("enter")
        result: tuple[Any, Any] = tree_map_only(torch.Tensor, self._marked_end, (args, kwargs))
        return result

    def _marked_end(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        passed = tensor.view_as(tensor)  # its gradient is there when this unit is through with it
        passed.register_hook(partial(self._mark, "through"))
        return passed

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._missing.discard(module)
        if self._missing:
            return
        self._mark("leave")
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._mark, "return"))
