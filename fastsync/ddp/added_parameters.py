"""Parameters that a script gives to a module after it was wrapped, which no rank synchronises."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fastsync.reducer.engine import Engine, engines
from fastsync.reducer.optimizer_hooks import StepWatcher, params_of, watch_steps
from fastsync.reducer.registrations import registrations

# What torch's DDP reads when it wraps, too.
IGNORED = "_ddp_params_and_buffers_to_ignore"


@dataclass
class _Looked:
    """Parameters that an optimizer steps on beside those of an engine, as of the last look.

    Attributes:
        foreign: ids of those parameters.
        registrations: how many registrations there had been.
        added: those of these parameters that the module has, by name.
    """

    foreign: tuple[int, ...]
    registrations: int
    added: dict[str, torch.Tensor]


class AddedParameterGuard(StepWatcher):
    """Refuses the step of an optimizer on parameters that were added to the wrapped module.

    An optimizer that steps on parameters of the engine alone costs one look at their ids. With
    others, the module is searched for them whenever some module has been given something since.

    Args:
        engine: synchronises the parameters that the module had when it was wrapped.
        module: that was wrapped.
        ignored: names of parameters that the script synchronises itself.
    """

    def __init__(self, engine: Engine, module: nn.Module, ignored: Collection[str]) -> None:
        self._engine, self._module, self._ignored = engine, module, ignored
        self.known = frozenset(id(param.tensor) for param in engine.params)
        self._looked: weakref.WeakKeyDictionary[Optimizer, _Looked] = weakref.WeakKeyDictionary()
        registrations()  # are counted from now on
        watch_steps(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise where the step would be one on gradients of this rank alone.

        Raises:
            RuntimeError: it would; names the parameters. On every rank whose script is the same.
        """
        if all(self.known.issuperset(map(id, group["params"])) for group in _groups(optimizer)):
            return
        stepped = [n for n, p in self._added(optimizer).items() if p.grad is not None]
        if stepped and self._engine.group.size() > 1:
            raise RuntimeError(_refusal(stepped, self._engine.group.rank()))

    def _added(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return the module's parameters that it steps on, and that no wrapper synchronises."""
        foreign = tuple(id(p) for p in params_of(optimizer) if id(p) not in self.known)
        number, looked = registrations(), self._looked.get(optimizer)
        if looked is None or (looked.foreign, looked.registrations) != (foreign, number):
            looked = _Looked(foreign, number, self._search(set(foreign)))
            self._looked[optimizer] = looked
        return looked.added

    def _search(self, foreign: set[int]) -> dict[str, torch.Tensor]:
        for engine in engines():  # of another wrapper, which may have what this one misses
            foreign -= {id(param.tensor) for param in engine.params}
        if not foreign:
            return {}
        ignored = {*self._ignored, *getattr(self._module, IGNORED, ())}
        modules = self._module.named_modules()
        wrapped = tuple(f"{n}." for n, m in modules if isinstance(m, DistributedDataParallel))
        return {
            name: tensor
            for name, tensor in self._module.named_parameters()
            if id(tensor) in foreign and name not in ignored and not name.startswith(wrapped)
        }


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def _refusal(names: Sequence[str], rank: int) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"rank {rank}: an optimizer is about to step on parameter {names[0]!r}{more}, which the "
        "module got after it was wrapped, so that its gradients are not averaged and the ranks "
        "would diverge. Add or replace layers before FastDDP(model), or wrap the changed module "
        "anew. Parameters that the script synchronises itself have to be named in "
        f"model.module.{IGNORED}"
    )
