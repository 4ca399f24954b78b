"""The fastest strategy that fits and why, or what to change where nothing fits.

Remedies are planned before they are named. In order of what they cost: another batch, another
strategy, both, more GPUs. Where none of them helps, the advice says what fills the memory however
many GPUs there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastsync.planner.memory import Memory
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.scenario import Candidate, Scenario
from fastsync.planner.strategy import Strategy

__all__ = ["MOST_GPUS", "Advice", "advise"]

MOST_GPUS = 16384
# Steps that differ by less count as equally fast: simpler is better, and plans are not exact to it.
_ALIKE = 0.03
_SAME = 0.0005  # what differs by less is shown as the same
_ALL = ("0", "1", "2", "3", "hsdp")


@dataclass(frozen=True)
class Advice:
    """The strategy to take, or what to change.

    Attributes:
        best, second: in this order; None where nothing fits.
        reasons: one sentence each.
    """

    best: Candidate | None
    second: Candidate | None
    reasons: tuple[str, ...]


def advise(candidates: Sequence[Candidate], scenario: Scenario) -> Advice:
    """Compare strategies for the same batch on the same ranks."""
    memory = scenario.device.memory
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        least = min((c.memory for c in candidates), key=lambda needed: needed.total)
        name = next(c.strategy.name for c in candidates if c.memory is least)
        nothing = (
            f"Nothing fits: {name} needs least, {gigabytes(least.total)}, which is "
            f"{gigabytes(least.total - memory)} more than there is; {_largest(least)}."
        )
        return Advice(None, None, (nothing, _remedy(candidates, scenario)))
    fastest = min(candidate.time.mean for candidate in fitting)
    ranked = sorted(fitting, key=lambda candidate: _rank(candidate, fastest))
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    time = best.time
    share = time.exposed / time.mean if time.mean else 0.0
    reasons = [
        f"Take {best.strategy.name}: {shown_seconds(time.mean)} a step, of which "
        f"{shown_seconds(time.exposed)} ({share:.0%}) is communication that nothing hides, and "
        f"{gigabytes(best.memory.total)} of {gigabytes(memory)} at the peak, "
        f"{_largest(best.memory)}."
    ]
    if second is not None:
        reasons.append(_why_not(second, best))
    quicker = [c for c in candidates if not c.fits and c.time.mean < time.mean]
    if quicker:
        first = min(quicker, key=lambda candidate: candidate.time.mean)
        batch = f"; {_samples(first.largest_batch)} fit" if first.largest_batch else ""
        reasons.append(
            f"{first.strategy.name} would be {1 - first.time.mean / time.mean:.1%} faster but "
            f"needs {gigabytes(first.memory.total - memory)} more than there is{batch}."
        )
    return Advice(best, second, tuple(reasons))


def _rank(candidate: Candidate, fastest: float) -> tuple[float, bool, int, float]:
    """Return a sort key: fastest first; of equally fast ones, the least change of the script."""
    slower = candidate.time.mean / fastest - 1
    strategy = candidate.strategy
    alike = 0.0 if slower < _ALIKE else slower
    return alike, strategy.wire != "fp32", strategy.stage, slower


def _largest(memory: Memory) -> str:
    item = max(memory.items, key=memory.items.__getitem__)
    return f"{memory.items[item] / memory.total:.0%} of it {item}"


def _why_not(second: Candidate, best: Candidate) -> str:
    slower = second.time.mean / best.time.mean - 1
    memory = second.memory.total - best.memory.total
    speed = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    more = f"{gigabytes(abs(memory))} {'less' if memory < 0 else 'more'} memory"
    sent = f"{gigabytes(second.time.sent)} instead of {gigabytes(best.time.sent)} sent"
    if abs(slower) < _SAME:
        speed = "as fast"
    if abs(memory) < _SAME * best.memory.total:
        more = "as much memory"
    if abs(second.time.sent - best.time.sent) <= _SAME * best.time.sent:
        sent = "as much sent"
    return (
        f"Second is {second.strategy.name}: {speed} ({shown_seconds(second.time.mean)}), with "
        f"{more} and {sent} per rank and step."
    )


def _remedy(candidates: Sequence[Candidate], scenario: Scenario) -> str:
    """Return the first change that helps, as a sentence; none of the candidates fits."""
    world = candidates[0].strategy.world
    tried = [candidate.strategy for candidate in candidates]
    wider = replace(scenario, kinds=_ALL, checkpointing=(False, True))
    others = [strategy for strategy in wider.strategies(world) if strategy not in tried]
    return (
        _batch(scenario, tried)
        or _strategy(scenario, others)
        or _batch(scenario, others, "strategy and the batch")
        or _gpus(wider, world)
        or _gpus(replace(wider, samples=1), world)
        or _nothing(wider)
    )


def _batch(scenario: Scenario, strategies: Sequence[Strategy], what: str = "batch") -> str:
    """Return a remedy with fewer samples and more backwards: some strategies then also hold
    sums of gradients."""
    more = [replace(s, accumulate=max(2, s.accumulate)) for s in strategies]
    found = [(scenario.largest_batch(strategy), strategy) for strategy in more]
    samples, best = max(found, key=lambda pair: pair[0], default=(0, None))
    if best is None or not samples:
        return ""
    return (
        f"Change the {what} first: {best.name} fits with {_samples(samples)} per GPU; accumulate "
        "gradients over more backwards instead."
    )


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"


def _least(scenario: Scenario, strategies: Sequence[Strategy]) -> tuple[Strategy, Memory] | None:
    pairs = [(strategy, scenario.memory(strategy)) for strategy in strategies]
    return min(pairs, key=lambda pair: pair[1].total, default=None)


def _strategy(scenario: Scenario, others: Sequence[Strategy]) -> str:
    least = _least(scenario, others)
    if least is None or least[1].total > scenario.device.memory:
        return ""
    strategy, memory = least
    return (
        f"Change the strategy first: {strategy.name} fits, in {gigabytes(memory.total)}; let it be "
        "tried, without --strategies and --no-checkpointing."
    )


def _worlds(scenario: Scenario, world: int) -> Iterator[int]:
    """Yield twice as many ranks, four times as many, and so on, that fill nodes."""
    per_node = scenario.cluster.per_node
    while (world := 2 * world) <= MOST_GPUS:
        if world <= per_node or world % per_node == 0:
            yield world


def _gpus(scenario: Scenario, world: int) -> str:
    def fitting(number: int) -> tuple[Strategy, Memory] | None:
        least = _least(scenario, list(scenario.strategies(number)))
        return least if least and least[1].total <= scenario.device.memory else None

    worlds = list(_worlds(scenario, world))
    if not worlds or fitting(worlds[-1]) is None:  # if not on the most, on none
        return ""
    number, least = next((n, found) for n in worlds if (found := fitting(n)))
    strategy, memory = least
    return (
        f"Change the number of GPUs first: on {number}, {strategy.name} fits with "
        f"{_samples(scenario.samples)} per GPU, in {gigabytes(memory.total)}."
    )


def _nothing(scenario: Scenario) -> str:
    """Say why even one sample on the most GPUs is too much."""
    alone = replace(scenario, samples=1)
    worlds = [scenario.cluster.world, *_worlds(scenario, scenario.cluster.world)]
    least = _least(alone, list(alone.strategies(worlds[-1])))
    assert least is not None
    strategy, memory = least
    first = "Take GPUs with more memory, or shrink the model, first"
    if max(memory.items, key=memory.items.__getitem__) == "activations":
        first = "Shorten the sequences or shrink the model first: one sample is too much"
    return (
        f"{first}; on {worlds[-1]} GPUs, too, {strategy.name} with 1 sample needs "
        f"{gigabytes(memory.total)}, {_largest(memory)}."
    )
