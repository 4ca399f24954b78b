"""Times the training step of several variants against each other.

[Note: Interleaved rounds]
Machines drift: frequency, neighbours, caches. So every variant runs one short burst per round, the
order of a round is that of the last one rotated by one, and variants are compared within a round;
the median over rounds is reported. A burst starts with a barrier and one step that is not timed.
The time of a step is that of the slowest rank; ranks exchange their times after the round, never
inside it. Exposed synchronisation is the step less that of `no_sync` in the same round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from bench.check import check_variants
from bench.launch import Group
from bench.models import Workload
from bench.stats import Spread, quantile
from bench.training import Lane, make_batches, make_lane
from bench.wrappers import BASELINE, FLOOR, Variant

PROGRESS_SECONDS = 15.0  # between lines where the output is no terminal


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        rounds: bursts of each variant.
        steps: timed steps in a burst.
        warmup: steps of each variant before the first round.
        check_steps: training steps of the correctness check; 0 leaves it out.
        baseline: the variant that ratios refer to.
        optimizer: "sgd" or "adamw" makes its step part of the timed one; None leaves it out.
    """

    rounds: int = 15
    steps: int = 4
    warmup: int = 3
    check_steps: int = 4
    baseline: str = BASELINE
    optimizer: str | None = None


@dataclass(frozen=True)
class Timing:
    """The step of one variant; times in seconds.

    Attributes:
        step: of the slowest rank.
        ratio: to the baseline in the same round.
        exposed: step less that of no_sync in the same round, where no_sync ran.
        check: the verdict of the correctness check.
        rounds: the median step of every round.
    """

    variant: str
    step: Spread
    ratio: Spread
    exposed: Spread | None
    check: str
    rounds: tuple[float, ...]


@dataclass
class Progress:
    """One line on the terminal of rank 0, rewritten; elsewhere a line now and then."""

    group: Group
    last: float = field(default_factory=time.monotonic)

    def show(self, text: str) -> None:
        if not self.group.is_main:
            return
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()
        elif time.monotonic() - self.last > PROGRESS_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self.last = time.monotonic()

    def clear(self) -> None:
        """Makes room for a line that stays."""
        self.last = time.monotonic()
        if self.group.is_main and sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def measure(
    workload: Workload, variants: tuple[Variant, ...], group: Group, settings: Settings
) -> list[Timing]:
    """Checks, then times `variants`; the results are the same on every rank.

    Raises:
        bench.errors.CheckFailed: a variant trains other weights than default DDP.
        ValueError: the baseline is not among the variants.
    """
    names = [variant.name for variant in variants]
    if settings.baseline not in names:
        raise ValueError(f"expects the baseline {settings.baseline} among {', '.join(names)}")
    progress = Progress(group)
    progress.show(f"{workload.name}: checking that all variants train the same weights")
    verdicts = {}
    if settings.check_steps:
        verdicts = check_variants(workload, variants, group, settings.check_steps)
    batches = make_batches(workload, group)
    lanes = [make_lane(workload, v, group, settings.optimizer, batches) for v in variants]
    times = time_lanes(lanes, group, settings, progress)
    progress.clear()
    return summarise(dict(zip(names, times, strict=True)), verdicts, settings.baseline)


def time_lanes(
    lanes: list[Lane], group: Group, settings: Settings, progress: Progress
) -> list[list[float]]:
    """The median step in seconds of each lane (outer) in each round (inner)."""
    for lane in lanes:
        burst(lane, group, settings.warmup)
    results: list[list[float]] = [[] for _ in lanes]
    started = time.monotonic()
    for index in range(settings.rounds):
        times = torch.zeros(len(lanes), settings.steps, dtype=torch.float64)
        for place in range(len(lanes)):
            which = (index + place) % len(lanes)
            times[which] = torch.tensor(burst(lanes[which], group, settings.steps))
        for result, row in zip(results, group.max(times).tolist(), strict=True):
            result.append(quantile(row, 0.5))
        left = (time.monotonic() - started) / (index + 1) * (settings.rounds - index - 1)
        name = lanes[0].workload.name
        progress.show(f"{name}: round {index + 1}/{settings.rounds}, {left:.0f} s left")
    return results


def burst(lane: Lane, group: Group, steps: int) -> list[float]:
    """Seconds of each of `steps` steps on this rank, after one that is not counted."""
    clock: Callable[[], float] = time.perf_counter
    dist.barrier()
    lane.step()
    times = []
    for _ in range(steps):
        group.synchronize()
        start = clock()
        lane.step()
        group.synchronize()
        times.append(clock() - start)
    lane.optimizer.zero_grad(set_to_none=True)
    return times


def summarise(
    rounds: dict[str, list[float]], verdicts: dict[str, str], baseline: str
) -> list[Timing]:
    """Compares variants round by round.

    Args:
        rounds: by variant, the step in seconds of every round.
        verdicts: by variant, the correctness check's; may lack some.
        baseline: the key of `rounds` that ratios refer to.
    """
    floor = rounds.get(FLOOR)
    timings = []
    for name, steps in rounds.items():
        ratios = [a / b for a, b in zip(steps, rounds[baseline], strict=True)]
        exposed = None
        if floor is not None:
            exposed = Spread.of([a - b for a, b in zip(steps, floor, strict=True)])
        verdict = verdicts.get(name, "not checked")
        timings.append(
            Timing(name, Spread.of(steps), Spread.of(ratios), exposed, verdict, tuple(steps))
        )
    return timings
