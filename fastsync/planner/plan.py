"""A plan as lines of a terminal: the strategies, the advice, and how strategies scale.

The advice is the fastest strategy that fits and why, or what to change where nothing fits.
Remedies are planned before they are named: another batch first, then more GPUs. Where neither
helps, the advice says what fills the memory however many GPUs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastsync.config.sync_modes import SyncMode
from fastsync.planner.hardware import Cluster
from fastsync.planner.memory import Memory
from fastsync.planner.quantities import gigabytes, millions, shown_seconds
from fastsync.planner.scenario import Candidate, Scenario, StepCost, choose
from fastsync.planner.step_time import StepTime
from fastsync.planner.strategy import Strategy

MOST_GPUS = 16384
# Steps that differ by less count as equally fast: simpler is better, and plans are not exact to it.
_ALIKE = 0.03


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


def advise(candidates: Sequence[Candidate], scenario: Scenario) -> tuple[Candidate | None, str]:
    """Compare strategies for the same batch on the same ranks.

    Returns:
        The one to take, None where nothing fits; and the sentences that say why, or what to change.
    """
    memory = scenario.device.memory
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.memory.total)
        needed = least.memory
        nothing = (
            f"Nothing fits: {least.strategy.name} needs least, {gigabytes(needed.total)}, which is "
            f"{gigabytes(needed.total - memory)} more than there is; {_largest(needed)}."
        )
        return None, f"{nothing}\n{_remedy(scenario, least.strategy.world)}"
    fastest = min(candidate.time.mean for candidate in fitting)
    best = min(fitting, key=lambda candidate: _rank(candidate, fastest))
    time = best.time
    share = time.exposed / time.mean if time.mean else 0.0
    return best, (
        f"Take {best.strategy.name}: {shown_seconds(time.mean)} a step, of which "
        f"{shown_seconds(time.exposed)} ({share:.0%}) is communication that nothing hides, and "
        f"{gigabytes(best.memory.total)} of {gigabytes(memory)} at the peak, "
        f"{_largest(best.memory)}."
    )


def _rank(candidate: Candidate, fastest: float) -> tuple[float, bool, int, float]:
    """Return a sort key: fastest first; of equally fast ones, the least change of the script."""
    slower = candidate.time.mean / fastest - 1
    strategy = candidate.strategy
    alike = 0.0 if slower < _ALIKE else slower
    return alike, strategy.wire != "fp32", strategy.stage, slower


def _largest(memory: Memory) -> str:
    item = max(memory.items, key=memory.items.__getitem__)
    return f"{memory.items[item] / memory.total:.0%} of it {item}"


def _remedy(scenario: Scenario, world: int) -> str:
    """Return the first change that helps, as a sentence, where no strategy fits."""
    # Fewer samples and more backwards: some strategies then also hold sums of gradients.
    more = (replace(s, accumulate=max(2, s.accumulate)) for s in scenario.strategies(world))
    found = [(scenario.largest_batch(strategy), strategy) for strategy in more]
    samples, best = max(found, key=lambda pair: pair[0])
    if samples:
        return (
            f"Change the batch first: {best.name} fits with {_samples(samples)} per GPU; "
            "accumulate gradients over more backwards instead."
        )
    worlds, per_node = [], scenario.cluster.per_node
    while (world := 2 * world) <= MOST_GPUS:
        if world <= per_node or world % per_node == 0:
            worlds.append(world)
    for batch in (scenario, replace(scenario, samples=1)):
        if worlds and _fits(batch, _least(batch, worlds[-1])):  # if not on the most, on none
            number = next(n for n in worlds if _fits(batch, _least(batch, n)))
            strategy, memory = _least(batch, number)
            return (
                f"Change the number of GPUs first: on {number}, {strategy.name} fits with "
                f"{_samples(batch.samples)} per GPU, in {gigabytes(memory.total)}."
            )
    most = worlds[-1] if worlds else scenario.cluster.world
    strategy, memory = _least(replace(scenario, samples=1), most)
    return (
        "Take GPUs with more memory, shorten the sequences or shrink the model first: on "
        f"{most} GPUs, too, {strategy.name} with 1 sample needs {gigabytes(memory.total)}, "
        f"{_largest(memory)}."
    )


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"


def _least(scenario: Scenario, world: int) -> tuple[Strategy, Memory]:
    """Return the strategy that needs least memory on so many ranks."""
    pairs = [(strategy, scenario.memory(strategy)) for strategy in scenario.strategies(world)]
    return min(pairs, key=lambda pair: pair[1].total)


def _fits(scenario: Scenario, needed: tuple[Strategy, Memory]) -> bool:
    return needed[1].total <= scenario.device.memory
