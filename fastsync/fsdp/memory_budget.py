"""Memory that units may take before the next one is gathered ahead of time.

Whole parameters, and the buffers that shares and gradients travel in, lie in a pool. Its mark is a
setting of the environment. A unit that a module needs is gathered whatever the mark says; a unit
that is not needed yet is gathered only where it fits in besides.

A gather is a collective: either every rank begins it ahead of time, or none does. So ranks compare
their marks, and what fits follows from whole sizes of units, never from what a rank's allocator
says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from fastsync._build.env import Env
from fastsync.fsdp.param_group import Unit

__all__ = ["MARK", "NO_MARK", "fits", "mark_here"]

MARK = "FASTSYNC_UNIT_MEMORY_MB"
NO_MARK = sys.maxsize  # bytes
_MIB = 2**20


def mark_here() -> int:
    """The mark of this process, in bytes."""
    wanted = Env.read().unit_memory_mb
    return NO_MARK if wanted is None else max(1, int(wanted * _MIB))


def fits(mark: int, units: Iterable[Unit], reducing: Iterable[Unit]) -> bool:
    """Return whether `units` may be whole at once, while the gradients of one
    of `reducing` travel.
    """
    travelling = max((unit.bytes_to_reduce() for unit in reducing), default=0)
    return sum(unit.bytes_to_gather() for unit in units) + travelling <= mark
