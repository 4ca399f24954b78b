"""Compares plans with real steps on this machine: python -m docs.measure_planner

Two ranks over Gloo measure a profile on the planner's calibration model, then peaks and steps of
models that it has not seen. Steps with and without synchronisation take turns with all-reduces of
two sizes, so that a busy machine slows all of them alike. The result is docs/measured/here.json,
which docs/make_planner.py shows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.models import WORKLOADS
from examples.common.costs import peak_memory
from examples.common.machine import describe, environment
from examples.common.ranks import Group
from examples.common.training import make_lane
from examples.common.variants import FLOOR, OURS, Variant, fast_ddp, select
from fastsync.plan.policy import BucketPolicy
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster
from fastsync.planner.measure import measure
from fastsync.planner.memory import peak_of, phases_of
from fastsync.planner.profile import Profile, Sample, fit
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario
from fastsync.planner.strategy import engine_plan, named
from fastsync.planner.tracing import trace_model, trace_optimizer
from fastsync.testing import run_ranks

HERE = Path(__file__).resolve().parent / "measured" / "here.json"
RANKS, CAP_MB, TIMEOUT = 2, 25.0, 3000.0
PEAKS = ("wide", "transformer", "gpt2", "conv")
STEPS = ("wide", "transformer", "gpt2", "conv", "small")
STAGES = (0, 1, 2)
PROBES = (1 << 16, 1 << 24)  # bytes of all-reduces between steps


def adamw(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> Any:
    return trace_optimizer("adamw", shapes, foreach=False)


def traced(name: str) -> Record:
    workload = WORKLOADS[name]()
    shape = tuple(workload.batch(0, 0).shape)
    return trace_model(workload.build, shape, loss=lambda output, _: workload.loss(output))


def predicted_peak(record: Record, stage: int) -> float:
    """Bytes per byte of parameters."""
    strategy = named(str(stage), RANKS, RANKS)
    plan = engine_plan(record, strategy, buckets=BucketPolicy.from_mb(CAP_MB))
    return peak_of(phases_of(record, strategy, plan, adamw)).total / record.nbytes


def measured_peaks(group: Group, name: str) -> list[float | None]:
    """By stage; a first lane pays for what a process loads once."""
    workload = WORKLOADS[name]()
    make_lane(workload, Variant("warm", fast_ddp()), group, "adamw").step()

    def peak(stage: int) -> float | None:
        variant = Variant("run", fast_ddp(zero=stage, bucket_cap_mb=CAP_MB))
        return peak_memory(lambda: make_lane(workload, variant, group, "adamw"), group)

    return [peak(stage) for stage in STAGES]


def measured_steps(group: Group, name: str, rounds: int) -> list[float]:
    """Median seconds of forward and backward, on this rank alone and synchronised, and of the
    all-reduces of PROBES."""
    workload = WORKLOADS[name]()
    lanes = [
        make_lane(workload, variant, group, None) for variant in select(f"{FLOOR},{OURS}").variants
    ]
    probes = [torch.ones(nbytes // 4) for nbytes in PROBES]
    turns: list[Callable[[], object]] = [lane.step for lane in lanes]
    turns += [partial(dist.all_reduce, probe) for probe in probes]
    times: list[list[float]] = [[] for _ in turns]
    for turn in range(rounds + 3):
        for run, found in zip(turns, times, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            run()
            if turn >= 3:
                found.append(time.perf_counter() - begun)
    return [group.most(median(found)) for found in times]


def work(rank: int, world: int, rounds: int, with_peaks: bool) -> dict[str, Any]:
    """What a rank measures."""
    torch.set_num_threads(1)
    group = Group(rank, world, torch.device("cpu"))
    profile = measure(group.device)
    return {
        "environment": environment(group),
        "profile": profile,
        "steps": {name: measured_steps(group, name, rounds) for name in STEPS},
        "peaks": {name: measured_peaks(group, name) for name in PEAKS if with_peaks},
    }


def predicted_steps(profile: Profile, name: str, times: list[float]) -> tuple[float, float]:
    """Traced computation, and the measured one in its place."""
    rates, record = profile.device, traced(name)
    latency, rate = fit([Sample(n, t) for n, t in zip(PROBES, times[2:], strict=True)], RANKS)
    link = replace(profile, latency=latency, rate=rate).link()
    device = replace(
        Device("cpu", rates.flops, rates.flops, rates.bandwidth, 1e12, 0.0, 1.0, 1.0),
        overhead=rates.overhead,
        contention=rates.contention,
    )
    asked = Scenario(
        trace=lambda samples, checkpointing: record,
        samples=record.samples,
        optimizer=adamw,
        device=device,
        cluster=Cluster(RANKS, RANKS, link, link, "gloo"),
    )
    compute = replace(asked.compute, update=0.0)
    scale = times[0] / (compute.forward + compute.backward)
    seconds = [
        replace(asked, measured=measured).time(named("0", RANKS, RANKS)).mean
        for measured in (compute, compute.scaled(scale))
    ]
    return seconds[0], seconds[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25, help="of steps, for each model")
    parser.add_argument("--keep-peaks", action="store_true", help="measure steps alone")
    args = parser.parse_args()
    found = run_ranks(work, RANKS, args.rounds, not args.keep_peaks, timeout=TIMEOUT)[0]
    steps = {
        name: {
            "alone": times[0],
            "synchronised": times[1],
            "predicted": predicted_steps(found["profile"], name, times),
        }
        for name, times in found["steps"].items()
    }
    peaks: dict[str, Any] = {}
    if args.keep_peaks:
        peaks = json.loads(HERE.read_text(encoding="utf-8"))["peaks"]
    for name, measured in found["peaks"].items():
        record = traced(name)
        pairs = zip(STAGES, measured, strict=True)
        peaks[name] = [(stage, peak, predicted_peak(record, stage)) for stage, peak in pairs]
    document = {"machine": describe(found["environment"]), "steps": steps, "peaks": peaks}
    HERE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {HERE}")


if __name__ == "__main__":
    main()
