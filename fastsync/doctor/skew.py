"""How far the ranks' clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.doctor.finding import Finding, ok, warn
from fastsync.ranks.clocks import ClockOffset
from fastsync.ranks.words import name_ranks

__all__ = ["Skew", "check_skew", "find_skew", "wall_lead"]

_MOST = 0.5  # seconds


@dataclass(frozen=True)
class Skew:
    """A rank's time of day beside rank 0's.

    Attributes:
        seconds: by which it is ahead.
        error: how far off that may be, seconds.
    """

    seconds: float
    error: float


def wall_lead() -> int:
    """Nanoseconds from this machine's steady clock to its time of day."""
    return time.time_ns() - time.monotonic_ns()


def find_skew(
    leads: Sequence[int | None], offsets: Sequence[ClockOffset | None]
) -> list[Skew | None]:
    """Of every rank.

    Args:
        leads: by rank, its `wall_lead()`.
        offsets: by rank, from its steady clock to rank 0's.
    """
    found: list[Skew | None] = []
    for lead, offset in zip(leads, offsets, strict=True):
        if lead is None or offset is None or leads[0] is None:
            found.append(None)
        else:
            ahead = lead - leads[0] - offset.offset_ns
            found.append(Skew(ahead / 1e9, offset.error_ns / 1e9))
    return found


def check_skew(skews: Sequence[Skew | None]) -> list[Finding]:
    """Whether logs of several machines can be put in order."""
    known = {rank: skew for rank, skew in enumerate(skews) if skew is not None}
    if len(known) < 2:
        return []
    if not any(skew.error for skew in known.values()):
        return [ok("clocks", "all ranks read one clock")]
    off = [rank for rank, skew in known.items() if abs(skew.seconds) - skew.error > _MOST]
    most = max(known.values(), key=lambda skew: abs(skew.seconds))
    amount = f"up to {_in_units(abs(most.seconds))} (known to {_in_units(most.error)})"
    if not off:
        return [ok("clocks", f"times of day differ by {amount}")]
    text = f"beside rank 0's, the time of day is off by {amount} on {name_ranks(off)}"
    remedy = "Run chrony or another NTP client on every machine, or logs cannot be compared"
    return [warn("clocks", text, remedy)]


def _in_units(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
