"""Checks and times single kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.errors import CheckFailed
from bench.kernel_cases import (
    OURS,
    PACK,
    Case,
    Scattered,
    Task,
    Way,
    make_scattered,
    methods,
)
from bench.models import Workload

SHORTEST = 2e-3  # seconds that a timed stretch takes at least, by repetition
MOST_REPETITIONS = 1000


@dataclass(frozen=True)
class Timer:
    """Times calls on one device: by its events on a GPU, else by the clock."""

    device: torch.device

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """Seconds of one of `times` calls in a row."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / times


def time_in_turn(ways: dict[str, Way], timer: Timer, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each way, in every round; the order is another one in each."""
    names = list(ways)
    counts = {}
    for name, way in ways.items():
        timer.seconds(way, 1)
        once = max(timer.seconds(way, 1), 1e-9)
        counts[name] = min(MOST_REPETITIONS, max(1, round(SHORTEST / once)))
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for place in range(len(names)):
            name = names[(index + place) % len(names)]
            found[name].append(timer.seconds(ways[name], counts[name]))
    return found


def transfer(case: Case, workload: Workload, device: torch.device) -> Task:
    """A case with random gradients of the workload's shapes."""
    data = make_scattered(workload, case, device)
    ways = methods(case, data)
    return Task(data.bytes_moved(case), ways, lambda name, way: check(name, case, data, way))


def check(name: str, case: Case, data: Scattered, way: Way) -> None:
    """Runs a way once and compares its result, element by element, with the reference.

    fastsync's kernels promise to round once, which the reference does too. torch rounds before it
    multiplies, so that its methods may differ by one more rounding of the buffer's dtype.

    Raises:
        CheckFailed: an element differs.
    """
    expected = _reference(case, data)
    _spoil(case, data)
    result = way()
    if case.kind == PACK and isinstance(result, Tensor):  # a dense buffer of the way's own
        flat = torch.cat([e.reshape(-1) for e in expected])
        pairs = [(result, flat)]
    else:
        targets = data.views if case.kind == PACK else data.gradients
        pairs = list(zip(targets, expected, strict=True))
    limits = torch.finfo(case.flat)
    smallest = limits.smallest_normal * limits.eps
    rtol, atol = (0.0, 0.0) if name == OURS else (limits.eps, smallest)
    for target, wanted in pairs:
        if not torch.allclose(target.float(), wanted.float(), rtol=rtol, atol=atol):
            raise CheckFailed(f"{case.name} by {name}: not what the reference says")


def _reference(case: Case, data: Scattered) -> list[Tensor]:
    if case.kind == PACK:
        return [(g.double() * case.scale).to(case.flat) for g in data.gradients]
    return [(v.double() * case.scale).to(case.gradient) for v in data.views]


def _spoil(case: Case, data: Scattered) -> None:
    """Fills the targets, so that a way that writes nothing is found out."""
    for target in data.views if case.kind == PACK else data.gradients:
        target.fill_(float("nan"))
