"""The window of a timeline, and where it is written."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["TimelinePolicy"]


@dataclass(frozen=True)
class TimelinePolicy:
    """The steps that a timeline records, and where they are written.

    Attributes:
        path: the JSON file that rank 0 writes once the window is full, or at exit where training
            ends earlier. None: written on demand only, by `write_timeline`.
        skip: synchronised backwards before the window; the first steps are not like the others.
        steps: synchronised backwards in the window, after which recording ends. None: never ends.
        capacity: marks that each rank keeps, the latest ones; 5 a step, 4 a bucket, and with units
            4 for each gather and each reduction.
    """

    path: str | None = None
    skip: int = 3
    steps: int | None = 20
    capacity: int = 1 << 15

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ValueError(f"timeline: skip must not be negative, but is {self.skip}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"timeline: steps must be at least 1 or None, but is {self.steps}")
        if self.capacity < 1:
            raise ValueError(f"timeline: capacity must be at least 1, but is {self.capacity}")

    @classmethod
    def of(cls, wanted: str | os.PathLike[str] | bool | TimelinePolicy) -> TimelinePolicy | None:
        """Return the policy for an argument: a path, True (record, write on demand), a policy, or
        False."""
        if isinstance(wanted, TimelinePolicy):
            return wanted
        if isinstance(wanted, bool):
            return cls(steps=None) if wanted else None
        return cls(path=os.fspath(wanted))
