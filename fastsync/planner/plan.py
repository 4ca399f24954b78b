"""A plan as lines of a terminal: the strategies, the advice, and how strategies scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastsync.config.sync_modes import SyncMode
from fastsync.planner.advice import advise
from fastsync.planner.hardware import Cluster
from fastsync.planner.quantities import gigabytes, millions, shown_seconds
from fastsync.planner.scenario import Candidate, Scenario
from fastsync.planner.step_time import StepTime
from fastsync.sync.costs import StepCost, choose

__all__ = ["plan_text"]


def plan_text(scenario: Scenario, worlds: Sequence[int]) -> str:
    """Compare strategies on the first of `worlds`, and follow them over the others."""
    record, cluster = scenario.record(), scenario.cluster.of(worlds[0])
    candidates = [scenario.candidate(strategy) for strategy in scenario.strategies(worlds[0])]
    lines = [
        f"{record.model}, {millions(record.numel)} parameters, batch {scenario.samples}",
        _cluster_text(cluster),
        scenario.compute().source,
        "",
        *_strategy_lines(candidates, record.tokens / record.samples),
        "",
        "  batch: the largest per GPU that fits; memory is a rank's peak.",
        "",
        advise(candidates, scenario)[1],
        *(_mode_lines(scenario, cluster, candidates[0].time) if scenario.modes else ()),
    ]
    return "\n".join(lines + (_scaling_lines(scenario, worlds) if len(worlds) > 1 else []))


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


def _strategy_lines(candidates: Sequence[Candidate], tokens_per_sample: float) -> list[str]:
    unit = "tokens/s" if tokens_per_sample else "samples/s"
    headers = ("strategy", "memory", "fits", "batch", "step", "exposed", "efficiency", unit, "sent")
    rows = []
    for candidate in candidates:
        time, each = candidate.time, candidate.throughput * (tokens_per_sample or 1)
        fits = "yes" if candidate.fits else "no"
        batch = str(candidate.largest_batch or "-")
        row = (candidate.strategy.name, gigabytes(candidate.memory.total), fits, batch)
        times = (shown_seconds(time.mean), shown_seconds(time.exposed), f"{time.efficiency:.1%}")
        rows.append((*row, *times, f"{each:,.0f}", gigabytes(time.sent)))
    return _table(headers, rows)


def _mode_lines(scenario: Scenario, cluster: Cluster, every: StepTime) -> list[str]:
    """Compare modes of `sync=` with averages of gradients at every step."""
    steps: dict[SyncMode | None, StepCost] = {
        None: StepCost(every.mean, every.exposed, every.sent),
        **{mode: scenario.in_mode(mode, cluster.world) for mode in scenario.modes},
    }
    names = {mode: f"sync={mode.describe()}" if mode else "every step" for mode in steps}
    rows = [
        (names[mode], *map(shown_seconds, (cost.mean, cost.exposed)), gigabytes(cost.sent))
        for mode, cost in steps.items()
    ]
    table = _table(("ranks average, with zero=0,", "step", "exposed", "sent a step"), rows)
    best, link = choose(steps), cluster.intra if cluster.nodes == 1 else cluster.inter
    return ["", *table, "", f"At {gigabytes(link.reached)}/s choose {names[best]}."]


def _scaling_lines(scenario: Scenario, worlds: Sequence[int]) -> list[str]:
    strategies = [s for s in scenario.strategies(worlds[0]) if not s.checkpointing]
    rows = []
    for gpus in worlds:
        row = [str(gpus)]
        for strategy in strategies:
            shards = min(strategy.shards, gpus) if strategy.hybrid else gpus
            time = scenario.time(replace(strategy, world=gpus, shards=shards))
            row.append(f"{shown_seconds(time.mean)} {time.efficiency:.1%}")
        rows.append(row)
    headers = ("GPUs", *(strategy.name for strategy in strategies))
    return ["", "Step and efficiency by GPUs:", *_table(headers, rows)]
