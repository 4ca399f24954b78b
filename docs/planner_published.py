"""What others have published, beside plans for it: vTrain's measurements, and torchtitan's.

The figures stand in docs/measured/, with their sources. Horovod's and those of torch's DDP have a
module of their own, planner_scaling.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median

import torch
from torch import nn

from docs import planner_scaling
from docs.planner_tables import NDR, markdown, scenario, signed, summary
from fastsync.planner.compute import from_record
from fastsync.planner.devices import Device, device_named
from fastsync.planner.links import Cluster, Link, collective_seconds
from fastsync.planner.profile import Sample, fit
from fastsync.planner.record import Record
from fastsync.planner.simulate import job_of, simulate
from fastsync.planner.strategy import Carrier, engine_plan, named
from fastsync.planner.tracing import trace_model

VTRAIN = json.loads((Path(__file__).resolve().parent / "measured" / "vtrain.json").read_text())
A100 = Link(300e9, None, "nvlink", 0.8)
NARROW, ITERATIONS = "fitted to: 12 or 24 layers, 1,024 wide, 2 GPUs", "iterations of vTrain"
OWN = {ITERATIONS: "8.37 %, over every kind of parallelism"}  # as its paper states


# ---- vTrain ----------------------------------------------------------------------------------


def nvlink(world: int, link: Link = A100) -> Cluster:
    return Cluster(world, world, link, NDR)


@cache
def all_reduce_errors() -> dict[int, tuple[list[float], list[float]]]:
    """By GPUs: of NCCL's tables, and of the line that is fitted to 4 GPUs."""
    rows = [(g, size << 20, us * 1e-6) for g, size, us in VTRAIN["all_reduce"]["rows"]]
    latency, rate = fit([Sample(n, t) for g, n, t in rows if g == 4], 4)
    found = {}
    for world in (2, 4, 8):
        measured = replace(nvlink(world, Link(rate, latency)), backend="gloo")
        own = [(n, t) for g, n, t in rows if g == world]
        tables, line = (
            [collective_seconds("all_reduce", n, cluster) / t - 1 for n, t in own]
            for cluster in (nvlink(world), measured)
        )
        found[world] = tables, line
    return found


def all_reduce() -> str:
    """vTrain's all-reduces between A100 GPUs of a node."""
    body = []
    for world, (tables, line) in all_reduce_errors().items():
        shown = "(fitted here)" if world == 4 else ", ".join(map(signed, line))
        body.append((str(world), ", ".join(map(signed, tables)), summary(tables)[0], shown))
    sizes = ", ".join(str(size) for size in (1, 4, 16, 64, 256, 1024))
    headers = ("GPUs", f"NCCL's tables, error at {sizes} MiB", "median", "fitted on 4 GPUs, error")
    return markdown(headers, body)


class Block(nn.Module):
    """A layer as Megatron runs it: attention with a matrix of scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.attend(self.norms[0](x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split
        scores = torch.softmax(query @ key.transpose(-1, -2) / 8, -1)
        x = x + self.out((scores @ value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """Token embedding, layers, and an output tied to it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(51200, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.tokens.weight)


@dataclass(frozen=True)
class Iteration:
    """A row of vTrain's table."""

    gpus: int
    whole: int
    micro: int
    width: int
    layers: int
    milliseconds: float


def predicted(row: Iteration, record: Record, device: Device) -> float:
    """Seconds of an iteration: micro-batches, all-reduce, Adam with fp32 masters."""
    compute = from_record(record, device, 28.0 * record.numel)
    accumulate = row.whole // row.gpus // row.micro
    strategy = replace(named("0", row.gpus, row.gpus), accumulate=accumulate)
    plan, _ = engine_plan(record, strategy, carrier=Carrier.DEVICES)
    cluster = nvlink(row.gpus)
    return simulate(job_of(record, strategy, plan, compute, cluster, device)).mean


@cache
def iteration_errors() -> tuple[Device, dict[str, list[float]]]:
    """Efficiencies fitted to the narrower models, and errors of these and of the wider ones."""
    rows = [Iteration(*row) for row in VTRAIN["iterations"]["rows"]]
    keys = {(row.width, row.layers, row.micro) for row in rows}
    records = {
        (w, n, m): trace_model(lambda w=w, n=n: Gpt(w, n), (m, 1024), dtype=torch.float16)
        for w, n, m in sorted(keys)
    }

    def errors(chosen: Sequence[Iteration], device: Device) -> list[float]:
        found = []
        for row in chosen:
            record = records[row.width, row.layers, row.micro]
            found.append(predicted(row, record, device) / (row.milliseconds * 1e-3) - 1)
        return found

    ends = [row for row in rows if row.layers in (12, 24)]
    sets = {
        NARROW: [row for row in ends if row.width == 1024 and row.gpus == 2],
        "12 or 24 layers, 1,024 wide, 4 and 8 GPUs": [
            row for row in ends if row.width == 1024 and row.gpus > 2
        ],
        "12 or 24 layers, 2,048 wide, 2 to 8 GPUs": [row for row in ends if row.width == 2048],
        "16 or 20 layers, 2 to 8 GPUs": [row for row in rows if row not in ends],
    }
    grid = itertools.product((0.45, 0.55, 0.65, 0.75), (0.4, 0.6, 0.8), (4e-5, 6e-5, 8e-5, 1e-4))
    devices = [
        replace(device_named("a100"), efficiency=e, streaming=s, overhead=o) for e, s, o in grid
    ]
    best = min(devices, key=lambda d: median(abs(e) for e in errors(sets[NARROW], d)))
    return best, {name: errors(chosen, best) for name, chosen in sets.items()}


def iterations() -> str:
    """vTrain's iterations with data parallelism alone."""
    best, errors = iteration_errors()
    body = [(name, str(len(found)), *summary(found)) for name, found in errors.items()]
    table = markdown(("iterations", "rows", "median error", "worst", "bias"), body)
    fitted = (
        f"Fitted: {best.efficiency:.0%} of the arithmetic peak, {best.streaming:.0%} of the "
        f"memory's rate, {best.overhead * 1e6:g} us for the launch of an operator."
    )
    return f"{table}\n\n{fitted}"


# ---- torchtitan ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Tokens per second and GPU of Llama 3.1 8B on few GPUs, and on many."""

    name: str
    few: int
    slow: float
    many: int
    fast: float

    @property
    def kept(self) -> float:
        return self.fast / self.slow

    @cached_property
    def planned(self) -> float:
        """The same, with the computation of the few."""
        asked = scenario(8 * 10**9, self.few, (2, 8192))
        traced = asked.compute
        seconds = 2 * 8192 / self.slow - traced.update / self.few
        measured = traced.scaled(seconds / (traced.forward + traced.backward))
        asked = replace(asked, measured=measured, jitter=0.0)
        few, many = (asked.time(named("3", world, 8)).mean for world in (self.few, self.many))
        return few / many

    @property
    def error(self) -> float:
        return self.planned / self.kept - 1


@cache
def pairs() -> tuple[Pair, ...]:
    return tuple(Pair(*row) for row in planner_scaling.PUBLISHED["torchtitan"]["rows"])


def published() -> str:
    """Published efficiencies: computation fitted at the smaller size, communication predicted."""
    body = [
        (
            f"Llama 8B, FSDP, {pair.name}",
            f"{pair.few} to {pair.many}",
            f"{pair.kept:.1%}",
            f"{pair.planned:.1%}",
            signed(pair.error),
        )
        for pair in pairs()
    ]
    return markdown(("published", "GPUs", "kept throughput", "predicted", "error"), body)


# ---- all of it -------------------------------------------------------------------------------


def sets() -> str:
    """Errors by set, beside those that its own project states for its own predictor."""
    reduced = all_reduce_errors()
    iterated = iteration_errors()[1]
    found = {
        "all-reduces of vTrain, from NCCL's tables": [e for t, _ in reduced.values() for e in t],
        "the same, fitted on 4 GPUs": [
            e for world, (_, t) in reduced.items() if world != 4 for e in t
        ],
        ITERATIONS: [e for name, errors in iterated.items() if name != NARROW for e in errors],
        "torchtitan": [pair.error for pair in pairs()],
        "Horovod": planner_scaling.horovod_errors(),
        "torch's DDP": planner_scaling.ddp_errors(),
    }
    body = [
        (name, str(len(errors)), *summary(errors)[:2], OWN.get(name, "none"))
        for name, errors in found.items()
    ]
    headers = ("rows that nothing was fitted to", "rows", "median error", "worst", "own predictor")
    return markdown(headers, body)
