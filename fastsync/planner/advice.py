"""The fastest strategy that fits, the second one, and why, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.planner.devices import Device
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.remedies import remedy
from fastsync.planner.scenario import Candidate, Scenario

__all__ = ["Advice", "advise"]

# Steps that differ by less count as equally fast: simpler is better, and plans are not exact to it.
_ALIKE = 0.03
_SAME = 0.0005  # what differs by less is shown as the same


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        best, second: in this order; None where nothing fits.
        reasons: why, one sentence each.
    """

    best: Candidate | None
    second: Candidate | None
    reasons: tuple[str, ...]


def _rank(candidate: Candidate, fastest: float) -> tuple[float, bool, int, float]:
    """Fastest first; of those alike, what changes least in the script."""
    slower = candidate.time.mean / fastest - 1
    strategy = candidate.strategy
    alike = 0.0 if slower < _ALIKE else slower
    return alike, strategy.wire != "fp32", strategy.stage, slower


def advise(
    candidates: Sequence[Candidate], device: Device, scenario: Scenario | None = None
) -> Advice:
    """Compares strategies for the same batch on the same ranks.

    Args:
        scenario: with which remedies are planned where nothing fits; None: none is named.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        reasons = [_nothing_fits(candidates, device)]
        reasons += [remedy(candidates, scenario)] if scenario is not None else []
        return Advice(None, None, tuple(reasons))
    fastest = min(candidate.time.mean for candidate in fitting)
    ranked = sorted(fitting, key=lambda candidate: _rank(candidate, fastest))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    reasons = [_why(best, device)]
    if second is not None:
        reasons.append(_why_not(second, best))
    reasons += _quicker_but_too_large(candidates, best, device)
    return Advice(best, second, tuple(reasons))


def _why(best: Candidate, device: Device) -> str:
    time = best.time
    return (
        f"Take {best.strategy.name}: {shown_seconds(time.mean)} a step, of which "
        f"{shown_seconds(time.exposed)} ({_share(time.exposed, time.mean)}) is communication that "
        f"nothing hides, and {gigabytes(best.memory.total)} of {gigabytes(device.memory)} at the "
        f"peak, {_share(best.memory.items[best.memory.largest()], best.memory.total)} of it "
        f"{best.memory.largest()}."
    )


def _why_not(second: Candidate, best: Candidate) -> str:
    slower = second.time.mean / best.time.mean - 1
    memory = second.memory.total - best.memory.total
    speed = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    more = f"{gigabytes(abs(memory))} {'less' if memory < 0 else 'more'} memory"
    sent = f"{gigabytes(second.time.sent)} instead of {gigabytes(best.time.sent)} sent"
    if abs(slower) < _SAME:
        speed = "as fast"
    if abs(memory) < _SAME * best.memory.total:
        more = "as much memory"
    if abs(second.time.sent - best.time.sent) <= _SAME * best.time.sent:
        sent = "as much sent"
    return (
        f"Second is {second.strategy.name}: {speed} ({shown_seconds(second.time.mean)}), with "
        f"{more} and {sent} per rank and step."
    )


def _quicker_but_too_large(
    candidates: Sequence[Candidate], best: Candidate, device: Device
) -> list[str]:
    quicker = [c for c in candidates if not c.fits and c.time.mean < best.time.mean]
    if not quicker:
        return []
    first = min(quicker, key=lambda candidate: candidate.time.mean)
    gain = 1 - first.time.mean / best.time.mean
    over = first.memory.total - device.memory
    batch = f"; it fits with {first.largest_batch} samples per GPU" if first.largest_batch else ""
    return [
        f"{first.strategy.name} would be {gain:.1%} faster but needs {gigabytes(over)} more than "
        f"there is{batch}."
    ]


def _nothing_fits(candidates: Sequence[Candidate], device: Device) -> str:
    least = min(candidates, key=lambda candidate: candidate.memory.total)
    item = least.memory.largest()
    over = least.memory.total - device.memory
    return (
        f"Nothing fits: {least.strategy.name} needs least, {gigabytes(least.memory.total)}, which "
        f"is {gigabytes(over)} more than there is; "
        f"{_share(least.memory.items[item], least.memory.total)} of it are {item}."
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
