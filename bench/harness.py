"""Times the training step of several variants against each other.

[Note: Interleaved rounds]
Machines drift: frequency, neighbours, caches. So every variant runs one short burst per round, the
order of a round is that of the last one rotated by one, and variants are compared within a round;
the median over rounds is reported. A burst starts with a barrier and one step that is not timed.
The time of a step is that of the slowest rank; ranks exchange their times after the round, never
inside it. Exposed synchronisation is the step less that of `no_sync` in the same round.

[Note: Shared weights]
Without an optimizer nobody writes to the weights, so the models of all variants share theirs.
Otherwise a dozen variants of a large model would not fit into memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from bench.check import check_variants
from bench.launch import Group
from bench.models import Workload
from bench.stats import Spread, quantile
from bench.training import Lane, make_batches, make_lane
from bench.wrappers import BASELINE, FLOOR, Variant

PROGRESS_SECONDS = 15.0  # between lines where the output is no terminal
FEWEST_ROUNDS = 3

Meter = Callable[[], int]


def no_meter() -> int:
    """Counts nothing: where a step's bytes are of no interest."""
    return 0


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
        seconds: what the rounds of one model may take; fewer are run where they would take longer,
            but no fewer than FEWEST_ROUNDS. None sets no limit.
    """

    rounds: int = 15
    steps: int = 4
    warmup: int = 3
    check_steps: int = 4
    baseline: str = BASELINE
    optimizer: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Timing:
    """The step of one variant; times in seconds.

    Attributes:
        step: of the slowest rank.
        ratio: to the baseline in the same round.
        exposed: step less that of no_sync in the same round, where no_sync ran.
        check: the verdict of the correctness check.
        rounds: the median step of every round.
        exposed_ratio: exposed, to that of the baseline in the same round.
        sent_bytes: what a rank sent per step by the meter's count; median of the rounds.
    """

    variant: str
    step: Spread
    ratio: Spread
    exposed: Spread | None
    check: str
    rounds: tuple[float, ...]
    exposed_ratio: Spread | None = None
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class Measured:
    """One variant's median step in seconds and bytes sent per step, of every round."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)


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
    workload: Workload,
    variants: tuple[Variant, ...],
    group: Group,
    settings: Settings,
    meter: Meter = no_meter,
) -> list[Timing]:
    """Checks, then times `variants`; the results are the same on every rank.

    Args:
        meter: counts the bytes that this rank has sent so far.

    Raises:
        bench.errors.CheckFailed: a variant trains other weights than default DDP.
        ValueError: the baseline is not among the variants.
    """
    names = [variant.name for variant in variants]
    if settings.baseline not in names:
        raise ValueError(f"expects the baseline {settings.baseline} among {', '.join(names)}")
    progress = Progress(group)
    verdicts = {}
    if settings.check_steps:
        progress.show(f"{workload.name}: checking that all variants train the same weights")
        verdicts = check_variants(workload, variants, group, settings.check_steps)
    lanes = make_lanes(workload, variants, group, settings.optimizer)
    measured = time_lanes(lanes, group, settings, progress, meter)
    progress.clear()
    return summarise(dict(zip(names, measured, strict=True)), verdicts, settings.baseline)


def make_lanes(
    workload: Workload, variants: tuple[Variant, ...], group: Group, optimizer: str | None
) -> list[Lane]:
    """One lane per variant, all on the same batches."""
    batches = make_batches(workload, group)
    lanes: list[Lane] = []
    for variant in variants:
        lanes.append(make_lane(workload, variant, group, optimizer, batches))
        if optimizer is None:
            share_weights(lanes[-1].module, lanes[0].module)
    return lanes


def share_weights(module: nn.Module, owner: nn.Module) -> None:
    """Has the parameters of `module` use the memory of those of `owner`."""
    for mine, its in zip(module.parameters(), owner.parameters(), strict=True):
        mine.data = its.data


def time_lanes(
    lanes: list[Lane],
    group: Group,
    settings: Settings,
    progress: Progress,
    meter: Meter = no_meter,
) -> list[Measured]:
    """The steps of each lane in each round."""
    rounds = warm_up(lanes, group, settings, progress)
    results = [Measured() for _ in lanes]
    started = time.monotonic()
    for index in range(rounds):
        times = torch.zeros(len(lanes), settings.steps + 1, dtype=torch.float64)
        for place in range(len(lanes)):
            which = (index + place) % len(lanes)
            times[which] = torch.tensor(burst(lanes[which], group, settings.steps, meter))
        for result, row in zip(results, group.max(times).tolist(), strict=True):
            result.seconds.append(quantile(row[1:], 0.5))
            result.sent_bytes.append(row[0])
        left = (time.monotonic() - started) / (index + 1) * (rounds - index - 1)
        name = lanes[0].workload.name
        progress.show(f"{name}: round {index + 1}/{rounds}, {left:.0f} s left")
    return results


def warm_up(lanes: list[Lane], group: Group, settings: Settings, progress: Progress) -> int:
    """Runs each lane for a while; returns how many rounds fit into the time allowed."""
    per_step = 0.0
    for lane in lanes:
        progress.show(f"{lane.workload.name}: warming up")
        times = burst(lane, group, settings.warmup, no_meter)[1:]
        per_step += quantile(times, 0.5) if times else 0.0
    if settings.seconds is None:
        return settings.rounds
    slowest = float(group.max(torch.tensor([per_step], dtype=torch.float64)).item())
    fitting = int(settings.seconds / max(slowest * (settings.steps + 1), 1e-9))
    return min(settings.rounds, max(fitting, FEWEST_ROUNDS))


def burst(lane: Lane, group: Group, steps: int, meter: Meter) -> list[float]:
    """Bytes sent per step, then the seconds of each of `steps` steps, after one that is not
    counted; all of this rank."""
    clock: Callable[[], float] = time.perf_counter
    dist.barrier()
    lane.step()
    times = []
    before = meter()
    for _ in range(steps):
        group.synchronize()
        start = clock()
        lane.step()
        group.synchronize()
        times.append(clock() - start)
    sent = (meter() - before) / max(steps, 1)
    lane.optimizer.zero_grad(set_to_none=True)
    return [sent, *times]


def summarise(
    measured: dict[str, Measured], verdicts: dict[str, str], baseline: str
) -> list[Timing]:
    """Compares variants round by round.

    Args:
        measured: by variant.
        verdicts: by variant, the correctness check's; may lack some.
        baseline: the key of `measured` that ratios refer to.
    """
    floor = measured.get(FLOOR)
    steps_of_baseline = measured[baseline].seconds
    exposed_of_baseline = _less(steps_of_baseline, floor)
    timings = []
    for name, result in measured.items():
        exposed = _less(result.seconds, floor)
        timings.append(
            Timing(
                variant=name,
                step=Spread.of(result.seconds),
                ratio=Spread.of(_over(result.seconds, steps_of_baseline)),
                exposed=Spread.of(exposed) if exposed else None,
                check=verdicts.get(name, "not checked"),
                rounds=tuple(result.seconds),
                exposed_ratio=_exposed_ratio(exposed, exposed_of_baseline),
                sent_bytes=quantile(result.sent_bytes, 0.5),
            )
        )
    return timings


def _less(steps: list[float], floor: Measured | None) -> list[float]:
    if floor is None:
        return []
    return [a - b for a, b in zip(steps, floor.seconds, strict=True)]


def _over(values: list[float], base: list[float]) -> list[float]:
    return [a / b for a, b in zip(values, base, strict=True)]


def _exposed_ratio(exposed: list[float], of_baseline: list[float]) -> Spread | None:
    """None where it means nothing: the baseline is the floor, or no slower than it."""
    if not exposed or min(of_baseline) <= 0.0:
        return None
    return Spread.of(_over(exposed, of_baseline))
