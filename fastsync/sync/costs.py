"""Cost of a mode: what it sends, and how much of that steps wait for. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastsync.config.sync_modes import DiLoCo, SyncMode
from fastsync.reducer.bucket_layout import slot_layout
from fastsync.sync.schedule import Schedule

__all__ = ["StepCost", "choose", "step_cost"]

# Steps that differ by less are alike: plans are not exact to it.
_ALIKE = 0.03


@dataclass(frozen=True)
class StepCost:
    """A step, on average over a round.

    Attributes:
        mean: seconds of it.
        exposed: those of them that it waits.
        sent: bytes that leave a rank.
    """

    mean: float
    exposed: float
    sent: float


def step_cost(
    mode: SyncMode,
    numels: Sequence[int],
    world: int,
    alone: float,
    collective: Callable[[str, float], tuple[float, float]],
) -> StepCost:
    """Return the cost of a step of `world` ranks.

    Args:
        numels: sizes of the parameters.
        alone: seconds of a step that sends nothing.
        collective: seconds of an "all_reduce" or "all_gather", and bytes that leave a rank; by the
            bytes of the whole: what is summed, or what all ranks have after it.
    """
    schedule = Schedule.of(mode)
    codec = mode.codec if isinstance(mode, DiLoCo) else None
    if codec is None:
        kind, nbytes = "all_reduce", 4 * sum(numels)
    else:
        whole = getattr(codec, "whole", False)
        numel = sum(numels) if whole else slot_layout(numels, codec.block).numel
        kind, nbytes = "all_gather", world * codec.coded_bytes(numel)
    seconds, sent = collective(kind, nbytes / schedule.fragments)
    per_step = schedule.fragments / schedule.every
    exposed = per_step * max(0.0, seconds - schedule.overlap * alone)
    if schedule.overlap:  # what is sent in a step has to travel in one
        exposed = max(exposed, per_step * seconds - alone)
    return StepCost(alone + exposed, exposed, per_step * sent)


def choose(steps: Mapping[SyncMode | None, StepCost]) -> SyncMode | None:
    """Return the mode to take, of those that are as fast as the fastest: the one that averages most
    often, and most exactly. None averages at every step.
    """
    fastest = min(cost.mean for cost in steps.values())
    alike = [mode for mode, cost in steps.items() if cost.mean < (1 + _ALIKE) * fastest]
    return min(alike, key=lambda mode: (mode.every if mode else 0, -steps[mode].sent))
