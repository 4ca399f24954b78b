"""What tables of docs/planner.md share: their form, and the cluster that their plans are for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from fastsync.planner.devices import device_named
from fastsync.planner.links import Cluster, Link
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario
from fastsync.planner.synthetic import adam_by_formula, transformer_of

H100, NDR = Link(450e9, None, "nvlink", 0.82), Link(50e9, None, "net", 0.92)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *(["---:"] * (len(headers) - 1))]
    lines = [headers, aligned, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(error: float) -> str:
    return f"{100 * error:+.0f} %"


def summary(errors: Sequence[float]) -> tuple[str, str, str]:
    """Median and largest of the absolute errors, and the median of the signed ones."""
    sizes = [abs(error) for error in errors]
    return f"{100 * median(sizes):.1f} %", f"{100 * max(sizes):.0f} %", signed(median(errors))


def scenario(numel: int, world: int, batch: tuple[int, int]) -> Scenario:
    """A transformer of that size, in bf16 with fp32 masters, on nodes of 8 H100."""

    def trace(samples: int, checkpointing: bool) -> Record:
        return transformer_of(numel, torch.bfloat16, (samples, batch[1]), checkpointing)

    cluster = Cluster(world, 8, H100, NDR)
    device = device_named("h100")
    return Scenario(trace, batch[0], adam_by_formula, device, cluster, masters=True, jitter=0.02)
