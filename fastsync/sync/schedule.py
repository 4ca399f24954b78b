"""Steps that send and merge each fragment, and the cut into fragments. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.config.sync_modes import Delayed, DiLoCo, SyncMode


@dataclass(frozen=True)
class Schedule:
    """Steps of a round, counted from 1 since the last time that all ranks had the same parameters.

    Attributes:
        every: steps of a round, in which each fragment is sent once.
        fragments: number of fragments.
        overlap: steps from sending a fragment to merging it.
    """

    every: int
    fragments: int = 1
    overlap: int = 0

    @classmethod
    def of(cls, mode: SyncMode) -> Schedule:
        if isinstance(mode, DiLoCo):
            return cls(mode.every, mode.fragments, mode.overlap)
        return cls(mode.every, overlap=mode.steps if isinstance(mode, Delayed) else 0)

    def sends(self, step: int, fragment: int) -> bool:
        """Return whether `fragment` is sent after `step`: the last one ends the round."""
        return step > 0 and step % self.every == self._place(fragment) % self.every

    def ends_round(self, step: int) -> bool:
        """Return whether each fragment has been sent since the last step that ended a round."""
        return step > 0 and step % self.every == 0

    def _place(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


def cut(numels: Sequence[int], parts: int) -> list[range]:
    """Cut tensors that follow each other into `parts` of similar numbers of elements.

    Returns:
        Positions of tensors, by part. A part is empty where there are too few tensors.
    """
    total, ranges, begin, sum_before = sum(numels), [], 0, 0
    for part in range(1, parts + 1):
        end = begin
        # A tensor belongs to the part that holds its middle element.
        while end < len(numels) and (2 * sum_before + numels[end]) * parts <= 2 * total * part:
            sum_before += numels[end]
            end += 1
        ranges.append(range(begin, len(numels) if part == parts else end))
        begin = end
    return ranges
