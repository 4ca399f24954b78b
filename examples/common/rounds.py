"""Times the training step of several variants against each other.

[Note: Interleaved rounds]
Machines drift: frequency, neighbours, caches. So every variant runs one short burst per round, the
order of a round is that of the last one rotated by one, and variants are compared within a round;
the median over rounds is reported. A burst starts with a barrier and one step that is not timed.
The time of a step is that of the slowest rank; ranks exchange their times after the last round,
never inside one. Exposed synchronisation is the step less that of `no_sync` in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from examples.common.check import check_variants
from examples.common.ranks import Group
from examples.common.text import Progress, Spread, milliseconds, ratio, render
from examples.common.training import Lane, Workload, make_lanes
from examples.common.variants import BASELINE, FLOOR, Variant

SCHEMA = 1
FEWEST_ROUNDS = 3

T = TypeVar("T")
Meter = Callable[[], int]


def in_turn(
    names: Iterable[str],
    once: Callable[[str], T],
    rounds: int,
    after: Callable[[int], object] = lambda index: None,
) -> dict[str, list[T]]:
    """Return the results of `once` by name, one per round; each round begins with another name.

    Args:
        after: called with the number of each round that has ended, from 0.
    """
    order = list(names)
    found: dict[str, list[T]] = {name: [] for name in order}
    for index in range(rounds):
        for place in range(len(order)):
            name = order[(index + place) % len(order)]
            found[name].append(once(name))
        after(index)
    return found


def slowest(found: dict[str, list[T]], group: Group) -> dict[str, list[T]]:
    """Return the same with every number replaced by the largest of all ranks'; numbers or lists of
    one length."""
    largest = group.max(torch.tensor(list(found.values()), dtype=torch.float64)).tolist()
    return dict(zip(found, largest, strict=True))


def host_seconds(call: Callable[[], object]) -> float:
    """Return the seconds for which a call keeps the host; it waits for no device."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def over(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratios, round by round."""
    return [a / b for a, b in zip(values, base, strict=True)]


def less(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Differences, round by round."""
    return [a - b for a, b in zip(values, base, strict=True)]


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        rounds: bursts of each variant.
        steps: timed steps in a burst.
        warmup: steps of each variant before the first round.
        check_steps: training steps of the correctness check; 0 leaves it out.
        optimizer: "sgd" or "adamw" makes its step part of the timed one; None leaves it out.
        seconds: what the rounds of one model may take; fewer are run where they would take longer,
            but no fewer than FEWEST_ROUNDS. None sets no limit.
    """

    rounds: int = 15
    steps: int = 4
    warmup: int = 3
    check_steps: int = 4
    optimizer: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Timing:
    """The step of one variant; times in seconds.

    Attributes:
        step: of the slowest rank.
        ratio: to BASELINE in the same round.
        exposed: step less that of FLOOR in the same round.
        check: the verdict of the correctness check.
        rounds: the median step of every round.
        exposed_ratio: exposed, to that of BASELINE in the same round.
        sent_bytes: what a rank sent per step by the meter's count; median of the rounds.
    """

    variant: str
    step: Spread
    ratio: Spread
    exposed: Spread
    check: str
    rounds: tuple[float, ...]
    exposed_ratio: Spread | None
    sent_bytes: float


@dataclass(frozen=True)
class Measured:
    """One variant's median step in seconds and bytes sent per step, of every round."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)


def measure(
    workload: Workload, variants: tuple[Variant, ...], group: Group, settings: Settings
) -> list[Timing]:
    """Check, then time `variants`, BASELINE and FLOOR among them; the same on every rank.

    Raises:
        CheckFailed: a variant trains other weights than default DDP.
    """
    verdicts = checked(workload, variants, group, settings.check_steps)
    lanes = make_lanes(workload, variants, group, settings.optimizer)
    return summarise(time_lanes(lanes, group, settings), verdicts)


def checked(
    workload: Workload, variants: tuple[Variant, ...], group: Group, steps: int
) -> dict[str, str]:
    """Return the verdicts of the correctness check, by variant; none where `steps` is 0."""
    if not steps:
        return {}
    progress = Progress(group)

    def show(name: str) -> None:
        progress.show(f"{workload.name}: checking the weights that {name} trains")

    verdicts = check_variants(workload, variants, group, steps, show)
    progress.clear()
    return verdicts


def time_lanes(
    lanes: dict[str, Lane], group: Group, settings: Settings, meter: Meter = lambda: 0
) -> dict[str, Measured]:
    """Return the steps of each lane in each round; `meter` counts the bytes sent by this rank."""
    progress, rounds, per_step = Progress(group), settings.rounds, 0.0
    for name, lane in lanes.items():
        progress.show(f"{lane.workload.name}: warming up {name}")
        times = burst(lane, group, settings.warmup)[1:]
        per_step += median(times) if times else 0.0
    if settings.seconds is not None:
        fitting = int(settings.seconds / max(group.most(per_step) * (settings.steps + 1), 1e-9))
        rounds = min(rounds, max(fitting, FEWEST_ROUNDS))
    started = time.monotonic()

    def show(index: int) -> None:
        left = (time.monotonic() - started) / (index + 1) * (rounds - index - 1)
        name = next(iter(lanes.values())).workload.name
        progress.show(f"{name}: round {index + 1}/{rounds}, {left:.0f} s left")

    found = in_turn(lanes, lambda n: burst(lanes[n], group, settings.steps, meter), rounds, show)
    progress.clear()
    return {
        name: Measured([median(row[1:]) for row in rows], [row[0] for row in rows])
        for name, rows in slowest(found, group).items()
    }


def burst(lane: Lane, group: Group, steps: int, meter: Meter = lambda: 0) -> list[float]:
    """Return the bytes sent per step, then the seconds of each of `steps` steps, after one that is
    not counted; all of this rank.

    A rank may end a step while the link still has a queue of what it has sent. A barrier's
    messages queue after that, so what the meter counts between two barriers is of these steps.
    """
    dist.barrier()
    lane.step()
    dist.barrier()
    before = meter()
    times = [group.timed(lane.step) for _ in range(steps)]
    dist.barrier()
    sent = (meter() - before) / max(steps, 1)
    lane.optimizer.zero_grad(set_to_none=True)
    return [sent, *times]


def summarise(measured: dict[str, Measured], verdicts: Mapping[str, str]) -> list[Timing]:
    """Compare variants with BASELINE and FLOOR round by round.

    Args:
        verdicts: by variant, the correctness check's; may lack some.
    """
    base, floor = measured[BASELINE].seconds, measured[FLOOR].seconds
    of_base = less(base, floor)
    timings = []
    for name, result in measured.items():
        exposed = less(result.seconds, floor)
        timing = Timing(
            variant=name,
            step=Spread.of(result.seconds),
            ratio=Spread.of(over(result.seconds, base)),
            exposed=Spread.of(exposed),
            check=verdicts.get(name, "not checked"),
            rounds=tuple(result.seconds),
            # Means nothing where the baseline was once no slower than the floor.
            exposed_ratio=Spread.of(over(exposed, of_base)) if min(of_base) > 0.0 else None,
            sent_bytes=median(result.sent_bytes),
        )
        timings.append(timing)
    return timings


def table(timings: Sequence[Timing], more: Mapping[str, Sequence[str]]) -> str:
    """Return one row per variant; ± is half the range between the quartiles of the rounds.

    Args:
        more: further columns, by their headers.
    """
    headers = ("variant", "step ms", "±", f"ratio to {BASELINE}", "±", "exposed ms", "±", *more)
    rows = []
    for timing, *cells in zip(timings, *more.values(), strict=True):
        times = (*milliseconds(timing.step), *ratio(timing.ratio), *milliseconds(timing.exposed))
        rows.append((timing.variant, *times, *cells, timing.check))
    return render((*headers, "weights"), rows)


def model_record(workload: Workload, timings: list[Timing]) -> dict[str, Any]:
    """One model's part of the result; times in seconds."""
    parameters = list(workload.build().parameters())
    return {
        "tensors": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "variants": {timing.variant: asdict(timing) for timing in timings},
    }
