"""CommDebugMode that counts what units gather and reduce, too.

fastsync's gathers and reductions do not pass torch's dispatcher, where CommDebugMode looks. Those
of parts that few ranks keep do, and are counted by units as well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from fastsync.fsdp import group_links
from fastsync.fsdp.context import Context
from fastsync.fsdp.module_hooks import state_of

__all__ = ["CountingMode", "note_modules"]

_GATHER, _REDUCE = torch.ops.c10d._allgather_base_, torch.ops.c10d._reduce_scatter_base_
_modules: list[nn.Module] = []


def note_modules(modules: nn.Module | list[nn.Module]) -> None:
    """Count what these modules gather and reduce from now on."""
    _modules.extend([modules] if isinstance(modules, nn.Module) else modules)


def _counters() -> dict[Any, int]:
    contexts: dict[int, Context[Any]] = {}
    for module in _modules:
        state = state_of(module)
        if state is not None:
            contexts[id(state.context)] = state.context
    found: dict[Any, int] = defaultdict(int)
    alone = dist.get_world_size() == 1
    for context in contexts.values():
        for counted in context.counters():
            found[_GATHER] += counted["gathers"]
            found[_REDUCE] += 0 if alone else counted["reductions"]
    return found


class CountingMode(CommDebugMode):
    """Counts between `__enter__` and `__exit__`, in addition to what torch counts."""

    def __enter__(self) -> CountingMode:
        super().__enter__()
        self._before, self._twice = _counters(), 0
        self._gather = group_links.all_gather_flat
        setattr(group_links, "all_gather_flat", self._counted_twice)  # noqa: B010
        return self

    def _counted_twice(self, *args: Any) -> dist.Work:
        self._twice += 1
        return self._gather(*args)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        setattr(group_links, "all_gather_flat", self._gather)  # noqa: B010
        if self._twice:
            self.comm_counts[_GATHER] -= self._twice
        for kind, count in _counters().items():
            if count > self._before[kind]:
                self.comm_counts[kind] += count - self._before[kind]
