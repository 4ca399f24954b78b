"""Times and kernels of training steps on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from examples.common.rounds import host_seconds
from examples.common.training import Lane

WARMUP = 6  # steps: a plan is renewed after the first, and cuDNN and the allocator settle
MOST_CYCLES = 2.1e9  # of a GPU's clock in a second: it sleeps longer at a lower one
COMMUNICATION = "nccl"  # in the names of kernels that communicate

Interval = tuple[float, float]


def stopwatch(device: torch.device, ahead: float = 0.0) -> Callable[[], float]:
    """Start to measure, by events on a GPU, else by the clock; what it returns ends that, and
    returns the seconds. A GPU first sleeps for `ahead` seconds, while the host hands it work."""
    if device.type != "cuda":
        start = time.perf_counter()
        return lambda: time.perf_counter() - start
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        torch.cuda._sleep(int(ahead * MOST_CYCLES))
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return stop


def run_burst(lane: Lane, device: torch.device, steps: int) -> tuple[float, float]:
    """Time `steps` steps after one that is not timed. Nothing waits for the device in between.

    Returns:
        Seconds of a step, and those for which `backward()` kept the host, the median.
    """
    lane.step()
    watch = stopwatch(device)
    host = [host_seconds(lane.forward().backward) for _ in range(steps)]
    return watch() / steps, median(host)


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy that ran on the device, with its start and end in seconds."""

    name: str
    start: float
    end: float


def device_work(run: Callable[[], object], device: torch.device) -> tuple[list[Kernel], profile]:
    """Return the kernels and copies that `run` has the GPU do, and the profile that saw them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize(device)
    kernels = [
        Kernel(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in seen.events() or ()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return kernels, seen


def launches(kernels: Iterable[Kernel]) -> int:
    """Return how many are kernels, rather than copies or fills by the driver."""
    return sum(not kernel.name.startswith(("Memcpy", "Memset")) for kernel in kernels)


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, covered = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def exposed(communication: Sequence[Interval], computation: Sequence[Interval]) -> float:
    """Return how long something communicates while nothing computes.

    The union of both is as long as the computation plus what of the communication lies beside it.
    """
    return length([*communication, *computation]) - length(computation)


def summary(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Return the seconds of communication, and those of them exposed."""
    sides: dict[bool, list[Interval]] = {True: [], False: []}
    for kernel in kernels:
        sides[COMMUNICATION in kernel.name.lower()].append((kernel.start, kernel.end))
    return length(sides[True]), exposed(sides[True], sides[False])
