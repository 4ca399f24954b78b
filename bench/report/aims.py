"""What the results of `bench gpu_all` say about the aims that they were made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import GPU_BOUND, HOST_BOUND, NETWORK_BOUND
from bench.report.tables import Point
from examples.common.machine import describe
from examples.common.text import render
from examples.common.variants import FLOOR, OURS

LARGE = 25e6  # bytes of gradients from which the kernels should run at the memory's rate

Result = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """One number that was aimed at.

    Attributes:
        text: what it is.
        result: the stage's file that it comes from.
        limit: the aim; the number shall be at least that if it is a rate (`least`), else at most.
        value: the number; None where the result does not hold what it takes.
        digits: of the number as shown.
    """

    text: str
    result: str
    limit: float
    value: Callable[[Result], float | None]
    least: bool = False
    digits: int = 2

    def row(self, result: Result) -> tuple[str, ...]:
        """Aim, number and verdict."""
        value, limit = (
            self.value(result),
            f"{'≥' if self.least else '≤'} {self.limit:.{self.digits}f}",
        )
        if value is None:
            return self.text, limit, "-", "-"
        met = value >= self.limit if self.least else value <= self.limit
        return self.text, limit, f"{value:.{self.digits}f}", "met" if met else "missed"


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
    ours = [(name, OURS) for name in GPU_BOUND.split(",") if (name, OURS) in found]
    return max((found[of]["ratio"]["median"] for of in ours), default=None)


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


def _network(wire: str, limit: float, other: str, against: str) -> Aim:
    value = speedup(f"{OURS}_{wire}", other)
    return Aim(f"network-bound, {wire} against {against}", "network", limit, value, least=True)


AIMS = (
    Aim("pack and unpack, of a copy's rate, from 25 MB up", "kernels", 0.92, share_of_copy, True),
    Aim("step of one rank, of the bare model's, GPU-bound", "overhead", 1.01, of_bare, digits=3),
    Aim("overhead of one rank, of torch's best, host-bound", "overhead", 1 / 3, of_best_overhead),
    _network("bf16", 1.9, "ddp", "DDP fp32"),
    _network("int8", 3.0, "ddp", "DDP fp32"),
    _network("bf16", 1.15, "ddp_fp16", "torch's fp16 hook"),
    _network("int8", 1.15, "ddp_fp16", "torch's fp16 hook"),
    Aim("peak memory of a step, of torch's best wrapper", "memory", 1.0, of_best_peak, digits=3),
)


def aims_table(folder: Path) -> str | None:
    """A Markdown table of the aims whose results are in a GPU's folder; None without any."""
    rows, origins = [], []
    for aim in AIMS:
        path = folder / f"{aim.result}.json"
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            rows.append(aim.row(result))
            origins.append(describe(result["environment"]))
    return f"{render(('', 'aim', 'measured', ''), rows, True)}\n\n{origins[0]}." if rows else None
