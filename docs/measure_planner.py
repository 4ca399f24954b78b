"""Compares plans with real steps on this machine: python -m docs.measure_planner

Two ranks over Gloo measure peaks, which may be done while the machine is busy, and a profile on the
planner's calibration model, then steps of models that it has not seen, with and without
synchronisation in turns. The results are docs/measured/peaks.json and here.json, which
docs/make_planner.py shows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.models import WORKLOADS
from docs.planner_peaks import MODELS, RANKS, Case, adamw, case_of, every_case, measured, traced
from examples.common.machine import describe, environment
from examples.common.ranks import Group
from examples.common.training import make_lane
from examples.common.variants import FLOOR, OURS, select
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster
from fastsync.planner.measure import measure
from fastsync.planner.profile import Profile
from fastsync.planner.scenario import Scenario
from fastsync.planner.strategy import named
from fastsync.testing import run_ranks

MEASURED = Path(__file__).resolve().parent / "measured"
FILES = {"peaks": MEASURED / "peaks.json", "steps": MEASURED / "here.json"}
TIMEOUT = 3000.0
STEPS = ("wide", "transformer", "gpt2", "conv", "small")


def measured_steps(group: Group, name: str, rounds: int) -> list[float]:
    """Median seconds of forward and backward, on this rank alone and synchronised."""
    workload = WORKLOADS[name]()
    lanes = [
        make_lane(workload, variant, group, None) for variant in select(f"{FLOOR},{OURS}").variants
    ]
    times: list[list[float]] = [[] for _ in lanes]
    for turn in range(rounds + 3):
        for lane, found in zip(lanes, times, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            lane.step()
            if turn >= 3:
                found.append(time.perf_counter() - begun)
    return [group.most(median(found)) for found in times]


def steps_here(rank: int, world: int, rounds: int) -> dict[str, Any]:
    """What a rank measures of steps."""
    torch.set_num_threads(1)
    group = Group(rank, world, torch.device("cpu"))
    profile = measure(group.device)
    return {
        "environment": environment(group),
        "profile": profile,
        "steps": {name: measured_steps(group, name, rounds) for name in STEPS},
    }


def peaks_here(rank: int, world: int, cases: list[Case]) -> dict[str, Any]:
    """What a rank measures of peaks."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # for the thread that looks
    group = Group(rank, world, torch.device("cpu"))
    return {"environment": environment(group), "peaks": [measured(c, group) for c in cases]}


def predicted_steps(profile: Profile, name: str, times: list[float]) -> tuple[float, float]:
    """Traced computation, and the measured one in its place."""
    rates, record = profile.device, traced(name)
    assert profile.inside is not None
    link = profile.inside.link(profile.backend)
    device = replace(
        Device("cpu", rates.flops, rates.flops, rates.bandwidth, 1e12, 0.0, 1.0, 1.0),
        overhead=rates.overhead,
        sending=rates.sending,
        launching=rates.launching,
        handling=rates.handling,
        coding=rates.coding,
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


def steps(rounds: int) -> dict[str, Any]:
    found = run_ranks(steps_here, RANKS, rounds, timeout=TIMEOUT)[0]
    times = {
        name: {
            "alone": times[0],
            "synchronised": times[1],
            "predicted": predicted_steps(found["profile"], name, times),
        }
        for name, times in found["steps"].items()
    }
    return {"machine": describe(found["environment"]), "steps": times}


def peaks(models: Sequence[str], way: str | None) -> Iterator[dict[str, Any]]:
    """Of these models, case by case; what is known of others stays.

    Args:
        way: as the table calls it; None: all of them.
    """
    path = FILES["peaks"]
    rows = json.loads(path.read_text())["peaks"] if path.exists() else []
    for case in every_case(models):  # in processes of their own: none finds what others have left
        if way not in (None, case.way):
            continue
        found = run_ranks(peaks_here, RANKS, [case], timeout=TIMEOUT)[0]
        own = {**asdict(case), "bytes": found["peaks"][0]}
        print(own, flush=True)
        rows = [row for row in rows if case_of(row) != case] + [own]
        ordered = sorted(rows, key=lambda row: MODELS.index(row["model"]))
        yield {"machine": describe(found["environment"]), "peaks": ordered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25, help="of steps, for each model")
    parser.add_argument("--only", choices=("steps", "peaks"), help="default: both")
    parser.add_argument("--models", default=",".join(MODELS), help="of peaks")
    parser.add_argument("--way", help="of peaks, as the table calls it (default: all)")
    args = parser.parse_args()
    documents = {
        "peaks": partial(peaks, args.models.split(","), args.way),
        "steps": lambda: iter([steps(args.rounds)]),
    }
    for name, make in documents.items():
        for document in make() if args.only in (None, name) else ():
            FILES[name].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
