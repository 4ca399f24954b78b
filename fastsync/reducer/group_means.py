"""Means of groups whose divisor is not the number of their ranks, to which a backward adds.

Every rank of a group has the mean when a backward adds to it, and their sum is divided again. So
that the mean counts once, each rank first takes an equal part of what it stands for: the mean times
divisor / ranks. That happens before a backward, of the wrapper or of the module itself, adds
something to it, or where a step begins that averages it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set

import torch
from torch.utils.hooks import RemovableHandle

from fastsync.reducer.weak_calls import weakly


class GroupMeans:
    """Gradients of such groups.

    Args:
        params: parameters.
        parts: divisor / ranks of those that have such a group, by position.
    """

    def __init__(self, params: Sequence[torch.Tensor], parts: Mapping[int, float]) -> None:
        self._params, self._parts = params, parts
        self._held: set[int] = set()  # positions of gradients that may be a mean
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._handles).atexit = False

    def note(self, planned: Set[int]) -> None:
        """Note that these gradients are means: the step that averages them has ended."""
        for index in self._parts.keys() & planned:
            if self._params[index].grad is None:
                continue
            self._held.add(index)
            if index not in self._handles:
                self._handles[index] = self._hook(index)

    def _hook(self, index: int) -> RemovableHandle:
        """Take the part of a mean before anything is added to it."""
        param, take = self._params[index], weakly(self._take)
        trained = param.requires_grad
        param.requires_grad_(True)  # torch takes no hook of one that is frozen now
        hook: RemovableHandle = param.register_hook(lambda _: take(index))
        param.requires_grad_(trained)
        return hook

    def start(self, planned: Set[int]) -> list[int]:
        """Start a step that averages these gradients.

        Returns:
            The positions of those of which each rank now has a part.
        """
        held = sorted(self._held & planned)
        for index in held:
            self._take(index)
        return [index for index in held if self._params[index].grad is not None]

    def _take(self, index: int) -> None:
        """Take this rank's part of a mean, unless there is none."""
        grad = self._params[index].grad
        if index in self._held and grad is not None:
            with torch.no_grad():
                grad.mul_(self._parts[index])
        self._held.discard(index)


def _remove(handles: Mapping[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
