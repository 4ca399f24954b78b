"""Means of groups whose divisor is not the number of their ranks, to which a backward adds.

Every rank of a group has the mean when a backward adds to it, and their sum is divided again. So
that the mean counts once, each rank first takes an equal part of what it stands for: the mean times
divisor / ranks. That happens before a backward, of the wrapper or of the module itself, adds
something to it, or where a step begins that averages it. What is there then is taken for the mean,
whatever a script has made of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from fastsync._torch import taking_hooks
from fastsync.reducer.weak_calls import weakly


class GroupMeans:
    """Gradients of such groups.

    Args:
        params: parameters.
        parts: divisor / ranks of those that have such a group, by position.
    """

    def __init__(self, params: Sequence[torch.Tensor], parts: Mapping[int, float]) -> None:
        self._params, self._parts = params, parts
        self._held: set[int] = set()  # positions of gradients that are means
        take = weakly(self._take)
        for index in parts:
            param = params[index]
            if param.is_floating_point() or param.is_complex():
                with taking_hooks(param):
                    hook = param.register_hook(lambda _, index=index: take(index))
                weakref.finalize(self, hook.remove).atexit = False

    def note(self, planned: Iterable[int]) -> None:
        """Note that these gradients are means: the step that averages them has ended."""
        found = self._parts.keys() & planned
        self._held.update(index for index in found if self._params[index].grad is not None)

    def start(self, planned: Iterable[int]) -> list[int]:
        """Start a step that averages these gradients.

        Returns:
            The positions of those of which each rank now has a part.
        """
        held = sorted(self._held.intersection(planned))
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
