"""A plan as people look at it: text, JSON, and one HTML page without any reference to a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from fastsync.page import make_page
from fastsync.planner.arithmetic import HeldRow
from fastsync.planner.links import Cluster
from fastsync.planner.plan import SATURATED, Plan, saturation
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.scenario import Candidate

__all__ = ["held_json", "held_text", "html_page", "plan_json", "plan_text"]

Json: TypeAlias = dict[str, object]

_PAGE = Path(__file__).resolve().parent / "page"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns; the first is aligned to the left, the others to the right."""
    cells = [list(headers), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def held_text(title: str, tables: Mapping[int, Sequence[HeldRow]]) -> str:
    """The formulas' tables by number of ranks."""
    shown = (f"{title}, {world} ranks\n\n{_held_table(rows)}" for world, rows in tables.items())
    note = (
        "What a rank holds from step to step, by the formulas of ZeRO. Activations, buffers and "
        "the framework come on top: add --batch SAMPLESxTOKENS for an estimate, or plan your own "
        "model with --model."
    )
    return "\n\n".join([*shown, note])


def held_json(title: str, tables: Mapping[int, Sequence[HeldRow]]) -> Json:
    """The same for programs; bytes."""
    rows = [
        {"strategy": row.strategy.name, "gpus": world, "items": row.items, "sent": row.sent}
        for world, found in tables.items()
        for row in found
    ]
    return {"format": "fastsync memory", "version": 1, "title": title, "rows": rows}


def _held_table(rows: Sequence[HeldRow]) -> str:
    names = [name for name in rows[0].items if any(row.items[name] for row in rows)]
    headers = ("per rank", *names, "total", "sent per step")
    body = [
        (
            row.strategy.name,
            *(gigabytes(row.items[name]) for name in names),
            gigabytes(row.total),
            gigabytes(row.sent),
        )
        for row in rows
    ]
    return "\n".join(_table(headers, body))


def _cluster_text(cluster: Cluster) -> str:
    def rate(value: float) -> str:
        return f"{gigabytes(value)}/s"

    inside = f"{rate(cluster.intra.reached)} inside a node"
    if cluster.nodes == 1:
        return f"{cluster.world} ranks over {cluster.backend}, {inside}"
    return (
        f"{cluster.world} ranks on {cluster.nodes} nodes over {cluster.backend}, {inside}, "
        f"{rate(cluster.inter.reached)} per rank between nodes"
    )


def _row(candidate: Candidate, tokens: float) -> tuple[str, ...]:
    time = candidate.time
    each = candidate.throughput * (tokens or 1)
    return (
        candidate.strategy.name,
        gigabytes(candidate.memory.total),
        "yes" if candidate.fits else "no",
        str(candidate.largest_batch or "-"),
        shown_seconds(time.mean),
        shown_seconds(time.exposed),
        f"{time.efficiency:.1%}",
        f"{each:,.0f}",
        gigabytes(time.sent),
    )


def plan_text(plan: Plan) -> str:
    """The plan as lines of a terminal."""
    lines = [plan.title, _cluster_text(plan.cluster), *plan.sources, plan.compute.source, ""]
    if plan.candidates:
        unit = "tokens/s" if plan.tokens_per_sample else "samples/s"
        headers = (
            *("strategy", "memory", "fits", "batch", "step", "exposed", "efficiency", unit),
            "sent",
        )
        rows = [_row(candidate, plan.tokens_per_sample) for candidate in plan.candidates]
        lines += _table(headers, rows)
        lines += ["", "  batch: the largest per GPU that fits; memory is a rank's peak."]
    if plan.advice:
        lines += ["", *plan.advice.reasons]
    return "\n".join([*lines, "", *_scaling_lines(plan)])


def _scaling_lines(plan: Plan) -> list[str]:
    names = list(dict.fromkeys(point.strategy for point in plan.scaling))
    worlds = list(dict.fromkeys(point.at for point in plan.scaling))
    found = {(point.strategy, point.at): point.time for point in plan.scaling}
    rows = []
    for world in worlds:
        cells = []
        for name in names:
            time = found.get((name, world))
            cells.append(
                "-" if time is None else f"{shown_seconds(time.mean)} {time.efficiency:.1%}"
            )
        rows.append((f"{world:g}", *cells))
    lines = ["Step and efficiency by GPUs:", *_table(("GPUs", *names), rows)]
    for name in names:
        at = saturation(plan.scaling, name)
        if at is not None:
            lines.append(f"  {name} falls below {SATURATED:.0%} at {at:g} GPUs.")
    return lines


def plan_json(plan: Plan) -> Json:
    """The plan for programs; bytes, seconds, and shares between 0 and 1."""
    return {
        "format": "fastsync plan",
        "version": 1,
        "title": plan.title,
        "device": asdict(plan.device),
        "cluster": asdict(plan.cluster),
        "compute": {**asdict(plan.compute), "ready": len(plan.compute.ready)},
        "sources": list(plan.sources),
        "tokens_per_sample": plan.tokens_per_sample,
        "candidates": [_candidate_json(candidate) for candidate in plan.candidates],
        "advice": _advice_json(plan),
        "scaling": [{"strategy": p.strategy, "gpus": p.at, **asdict(p.time)} for p in plan.scaling],
        "bandwidth": [
            {"strategy": p.strategy, "rate": p.at, **asdict(p.time)} for p in plan.bandwidth
        ],
    }


def _candidate_json(candidate: Candidate) -> Json:
    return {
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


def _advice_json(plan: Plan) -> Json:
    advice = plan.advice
    if advice is None:
        return {}
    return {
        "best": advice.best.strategy.name if advice.best else None,
        "second": advice.second.strategy.name if advice.second else None,
        "reasons": list(advice.reasons),
    }


def html_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else."""
    data = {**plan_json(plan), "where": "  ·  ".join((_cluster_text(plan.cluster), *plan.sources))}
    return make_page(_PAGE, f"fastsync plan: {plan.title}", data)
