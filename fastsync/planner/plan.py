"""A finished plan: the strategies, the advice, and how strategies scale; as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from fastsync.planner.advice import Advice, advise
from fastsync.planner.hardware import Cluster, Device
from fastsync.planner.quantities import gigabytes, millions, shown_seconds
from fastsync.planner.scenario import Candidate, Scenario
from fastsync.planner.step_time import Compute, StepTime

__all__ = ["Plan", "Point", "make_plan_of", "plan_json", "plan_text"]

Json: TypeAlias = dict[str, object]

_WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SATURATED = 0.8  # efficiency below which more GPUs are said to saturate


@dataclass(frozen=True)
class Point:
    """A strategy's step on one number of ranks."""

    strategy: str
    gpus: int
    time: StepTime


@dataclass(frozen=True)
class Plan:
    """A finished plan.

    Attributes:
        title: model and batch.
        candidates: on as many GPUs as were asked for.
        scaling: over numbers of GPUs.
    """

    title: str
    device: Device
    cluster: Cluster
    compute: Compute
    tokens_per_sample: float
    candidates: tuple[Candidate, ...]
    advice: Advice
    scaling: tuple[Point, ...]


def make_plan_of(scenario: Scenario, worlds: Sequence[int]) -> Plan:
    """Compare strategies on the first of `worlds`, and follow them over the others.

    Args:
        worlds: numbers of GPUs; with one alone, powers of two up to 16,384 are compared.
    """
    world, record = worlds[0], scenario.record()
    strategies = list(scenario.strategies(world))
    candidates = [scenario.candidate(strategy) for strategy in strategies]
    per_node, points = scenario.cluster.per_node, []
    for strategy in [s for s in strategies if not s.checkpointing] or strategies:
        for gpus in worlds if len(worlds) > 1 else _WORLDS:
            if gpus < per_node or gpus % per_node == 0:
                shards = min(strategy.shards, gpus) if strategy.hybrid else gpus
                at = replace(strategy, world=gpus, shards=shards)
                points.append(Point(strategy.name, gpus, scenario.time(at)))
    return Plan(
        title=f"{record.model}, {millions(record.numel)} parameters, batch {scenario.samples}",
        device=scenario.device,
        cluster=scenario.cluster.of(world),
        compute=scenario.compute(),
        tokens_per_sample=record.tokens / record.samples,
        candidates=tuple(candidates),
        advice=advise(candidates, scenario),
        scaling=tuple(points),
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return columns; the first is aligned to the left, the others to the right."""
    cells = [list(headers), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for first, *others in cells:
        padded = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join(("", first.ljust(widths[0]), *padded)).rstrip())
    return lines


def _cluster_text(cluster: Cluster) -> str:
    inside = f"{gigabytes(cluster.intra.reached)}/s inside a node"
    if cluster.nodes == 1:
        return f"{cluster.world} ranks over {cluster.backend}, {inside}"
    return (
        f"{cluster.world} ranks on {cluster.nodes} nodes over {cluster.backend}, {inside}, "
        f"{gigabytes(cluster.inter.reached)}/s per rank between nodes"
    )


def plan_text(plan: Plan) -> str:
    """Return the plan as lines of a terminal."""
    lines = [plan.title, _cluster_text(plan.cluster), plan.compute.source, ""]
    unit = "tokens/s" if plan.tokens_per_sample else "samples/s"
    headers = ("strategy", "memory", "fits", "batch", "step", "exposed", "efficiency", unit, "sent")
    rows = []
    for candidate in plan.candidates:
        time, each = candidate.time, candidate.throughput * (plan.tokens_per_sample or 1)
        fits = "yes" if candidate.fits else "no"
        batch = str(candidate.largest_batch or "-")
        row = (candidate.strategy.name, gigabytes(candidate.memory.total), fits, batch)
        times = (shown_seconds(time.mean), shown_seconds(time.exposed), f"{time.efficiency:.1%}")
        rows.append((*row, *times, f"{each:,.0f}", gigabytes(time.sent)))
    lines += _table(headers, rows)
    lines += ["", "  batch: the largest per GPU that fits; memory is a rank's peak."]
    return "\n".join([*lines, "", *plan.advice.reasons, "", *_scaling_lines(plan)])


def _scaling_lines(plan: Plan) -> list[str]:
    names = list(dict.fromkeys(point.strategy for point in plan.scaling))
    worlds = list(dict.fromkeys(point.gpus for point in plan.scaling))
    found = {(point.strategy, point.gpus): point.time for point in plan.scaling}
    rows = []
    for world in worlds:
        times = (found[name, world] for name in names)
        cells = (f"{shown_seconds(time.mean)} {time.efficiency:.1%}" for time in times)
        rows.append((str(world), *cells))
    lines = ["Step and efficiency by GPUs:", *_table(("GPUs", *names), rows)]
    for name in names:
        below = [n for n in worlds if found[name, n].efficiency < _SATURATED]
        if below:
            lines.append(f"  {name} falls below {_SATURATED:.0%} at {min(below)} GPUs.")
    return lines


def plan_json(plan: Plan) -> Json:
    """Return the plan for programs; bytes, seconds, and shares between 0 and 1."""
    best, second = plan.advice.best, plan.advice.second
    return {
        "format": "fastsync plan",
        "version": 2,
        "title": plan.title,
        "device": asdict(plan.device),
        "cluster": asdict(plan.cluster),
        "compute": {**asdict(plan.compute), "ready": len(plan.compute.ready)},
        "tokens_per_sample": plan.tokens_per_sample,
        "candidates": [
            {
                "name": candidate.strategy.name,
                "strategy": asdict(candidate.strategy),
                "memory": candidate.memory.items,
                "peak": candidate.memory.total,
                "phase": candidate.memory.phase,
                "fits": candidate.fits,
                "largest_batch": candidate.largest_batch,
                "samples_per_second": candidate.throughput,
                "time": asdict(candidate.time),
            }
            for candidate in plan.candidates
        ],
        "advice": {
            "best": best.strategy.name if best else None,
            "second": second.strategy.name if second else None,
            "reasons": list(plan.advice.reasons),
        },
        "scaling": [
            {"strategy": p.strategy, "gpus": p.gpus, **asdict(p.time)} for p in plan.scaling
        ],
    }
