"""What the results of bench.gpu_all say about the aims that they were made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_stages import GPU_BOUND, HOST_BOUND, NETWORK_BOUND
from bench.machine import describe
from bench.points import Point
from bench.tables import render
from bench.wrappers import FLOOR

OURS = "fastsync"
LARGE = 25e6  # bytes of gradients from which the kernels should run at the memory's rate

Result = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """One number that was aimed at.

    Attributes:
        text: what it is.
        result: the stage's file that it comes from.
        limit: the aim.
        least: whether the number shall be at least, not at most, the limit.
        value: the number; None where the result does not hold what it takes.
        digits: of the number as shown.
    """

    text: str
    result: str
    limit: float
    least: bool
    value: Callable[[Result], float | None]
    digits: int = 2

    def met(self, value: float) -> bool:
        """Whether `value` is on the aim's side of the limit."""
        return value >= self.limit if self.least else value <= self.limit


def _points(result: Result) -> dict[tuple[str, ...], Point]:
    return {tuple(point["of"]): point for point in result["points"]}


def share_of_copy(result: Result) -> float | None:
    """The smallest share of a plain copy's rate, of every model with LARGE gradients and more."""
    shares = [
        1 / point["ratio"]["median"]
        for (_, _, method), point in _points(result).items()
        if method == OURS and point["moved"] >= 2 * LARGE
    ]
    return min(shares, default=None)


def of_bare(result: Result) -> float | None:
    """The largest ratio of FastDDP's step to the bare model's, of models that keep the GPU busy."""
    found = _points(result)
    ratios = [
        found[name, OURS]["ratio"]["median"]
        for name in GPU_BOUND.split(",")
        if (name, OURS) in found
    ]
    return max(ratios, default=None)


def of_best_overhead(result: Result) -> float | None:
    """FastDDP's overhead over the smallest of torch's, of the model that waits for the host."""
    ratios = {
        variant: point["ratio"]["median"] - 1
        for (model, variant), point in _points(result).items()
        if model == HOST_BOUND and variant != FLOOR
    }
    ours = ratios.pop(OURS, None)
    best = min(ratios.values(), default=0.0)
    return ours / best if ours is not None and best > 0 else None


def speedup(ours: str, other: str) -> Callable[[Result], float | None]:
    """How many times as fast a step is, of the model that waits for the network."""

    def value(result: Result) -> float | None:
        timings = result["models"].get(NETWORK_BOUND, {"variants": {}})["variants"]
        steps = {name: timing["step"]["median"] for name, timing in timings.items()}
        return steps[other] / steps[ours] if ours in steps and other in steps else None

    return value


def of_best_peak(result: Result) -> float | None:
    """FastDDP's peak of memory over the smallest of torch's wrappers."""
    peaks = {row[0]: float(row[1]) for row in result["rows"] if row[1] != "n/a"}
    peaks.pop(FLOOR, None)
    ours = peaks.pop(OURS, None)
    return ours / min(peaks.values()) if ours is not None and peaks else None


AIMS = (
    Aim("pack and unpack, of a copy's rate, from 25 MB up", "kernels", 0.92, True, share_of_copy),
    Aim("step of one rank, of the bare model's, GPU-bound", "overhead", 1.01, False, of_bare, 3),
    Aim(
        "overhead of one rank, of torch's best, host-bound",
        "overhead",
        1 / 3,
        False,
        of_best_overhead,
    ),
    Aim(
        "network-bound, bf16 against DDP fp32",
        "network",
        1.9,
        True,
        speedup(f"{OURS}_bf16", "ddp"),
    ),
    Aim(
        "network-bound, int8 against DDP fp32", "network", 3.0, True, speedup(f"{OURS}_int8", "ddp")
    ),
    Aim(
        "network-bound, bf16 against torch's fp16 hook",
        "network",
        1.15,
        True,
        speedup(f"{OURS}_bf16", "ddp_fp16"),
    ),
    Aim(
        "network-bound, int8 against torch's fp16 hook",
        "network",
        1.15,
        True,
        speedup(f"{OURS}_int8", "ddp_fp16"),
    ),
    Aim("peak memory of a step, of torch's best wrapper", "memory", 1.0, False, of_best_peak, 3),
)


def aims_table(folder: Path) -> str | None:
    """A Markdown table of the aims whose results are in a GPU's folder; None without any."""
    rows = []
    origin = ""
    for aim in AIMS:
        path = folder / f"{aim.result}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        value = aim.value(result)
        origin = origin or describe(result["environment"])
        limit = f"{'≥' if aim.least else '≤'} {aim.limit:.{aim.digits}f}"
        measured = "-" if value is None else f"{value:.{aim.digits}f}"
        verdict = "-" if value is None else "met" if aim.met(value) else "missed"
        rows.append((aim.text, limit, measured, verdict))
    if not rows:
        return None
    return f"{render(('', 'aim', 'measured', ''), rows, True)}\n\n{origin}."
