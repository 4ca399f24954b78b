"""Training steps on the link that a rank lives on: what every rank of bench.links does."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bench.check import check_variants
from bench.errors import UsageError
from bench.formulas import bus_factor, variant_bytes
from bench.harness import Measured, Progress, Settings, make_lanes, summarise, time_lanes
from bench.launch import Group
from bench.models import WAITING, WORKLOADS, Workload
from bench.netns import Link, bits_per_second
from bench.stats import quantile
from bench.wrappers import Variant

PROBES = 3
PROBE_SECONDS = 0.4
SMALLEST_PROBE, LARGEST_PROBE = 4 * 2**20, 64 * 2**20  # bytes


@dataclass
class LinkRun:
    """What is measured on each link.

    Attributes:
        model: a key of WORKLOADS.
        wait: seconds of backward of the models that only wait; None for their default.
        variants: all of them, in the order of the tables.
        settings: how long to measure.
        link: this rank's.
    """

    model: str
    wait: float | None
    variants: tuple[Variant, ...]
    settings: Settings
    link: Link
    _checked: dict[float, dict[str, str]] = field(default_factory=dict, init=False)

    def workload(self, scale: float) -> Workload:
        """
        Raises:
            UsageError: there is no such model, or --wait is for another.
        """
        if self.model not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise UsageError(f"unknown model {self.model!r}; expects one of {known}")
        if self.wait is None:
            return WORKLOADS[self.model](scale=scale)
        if self.model not in WAITING:
            raise UsageError(f"--wait is for {' and '.join(WAITING)}, not for {self.model!r}")
        return WORKLOADS[self.model](scale=scale, seconds=self.wait)

    def verdicts(self, scale: float, group: Group) -> dict[str, str]:
        """Checks the variants with the model at `scale`, once."""
        if self.settings.check_steps and scale not in self._checked:
            progress = Progress(group)
            progress.show(f"{self.model}: checking that all variants train the same weights")
            steps, model = self.settings.check_steps, self.workload(scale)
            self._checked[scale] = check_variants(model, self.variants, group, steps)
            progress.clear()
        return self._checked.get(scale, {})


def measure_link(
    run: LinkRun, name: str, rate: str | None, scale: float, group: Group
) -> dict[str, Any]:
    """Shapes the link and times every variant on it; the result is ready for JSON.

    Returns:
        Times in seconds, sizes in bytes, rates in bytes per second; the same on every rank.
    """
    run.link.shape(None)  # checking and building would take long on a slow one
    dist.barrier()
    verdicts = run.verdicts(scale, group)
    gc.collect()
    # Of their own for each link: what they learn of one must not outlive it.
    lanes = make_lanes(run.workload(scale), run.variants, group, None)
    run.link.shape(rate)
    dist.barrier()
    measured_rate = all_reduce_rate(group, None if rate is None else bits_per_second(rate) / 8)
    progress = Progress(group)
    names = [variant.name for variant in run.variants]
    results = time_lanes(lanes, group, run.settings, progress, run.link.sent_bytes)
    progress.clear()
    measured: dict[str, Measured] = dict(zip(names, results, strict=True))
    timings = summarise(measured, verdicts, run.settings.baseline)
    parameters = list(lanes[0].module.parameters())
    shapes = [p.shape for p in parameters]
    return {
        "link": name,
        "ranks": group.world,
        "model": lanes[0].workload.name,
        "scale": scale,
        "tensors": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "rate_bytes_per_second": measured_rate,
        "variants": {
            timing.variant: asdict(timing) | _limit(variant, shapes, measured_rate, group)
            for variant, timing in zip(run.variants, timings, strict=True)
        },
    }


def _limit(
    variant: Variant, shapes: Sequence[torch.Size], rate: float, group: Group
) -> dict[str, float | None]:
    """The bytes that each rank has to send, and the seconds that the link needs for them."""
    payload = variant_bytes(variant, shapes, group.world, group.device)
    limit = None if payload is None else payload / rate
    return {"formula_bytes": payload, "limit_seconds": limit}


def all_reduce_rate(group: Group, expected: float | None) -> float:
    """Bytes per second that each rank sends during an all-reduce of a bare fp32 tensor.

    Args:
        expected: what the link was shaped to, so that a probe takes a moment and not minutes.
    """
    wanted = LARGEST_PROBE if expected is None else int(expected * PROBE_SECONDS)
    size = max(SMALLEST_PROBE, min(LARGEST_PROBE, wanted))
    tensor = torch.zeros(size // 4, device=group.device)
    seconds = []
    for _ in range(PROBES + 1):
        dist.barrier()
        group.synchronize()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        group.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = group.max(torch.tensor(seconds[1:], dtype=torch.float64)).tolist()
    return bus_factor(group.world) * size / quantile(slowest, 0.5)
