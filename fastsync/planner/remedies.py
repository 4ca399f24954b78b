"""What to change first where nothing fits: planned before it is said.

In order of what it costs: another batch, another strategy, both, more GPUs. Each is planned, and
the first with which something fits is named. Where none does, it is said what fills the memory
however many GPUs there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fastsync.planner.memory import Memory
from fastsync.planner.quantities import gigabytes
from fastsync.planner.scenario import Candidate, Scenario
from fastsync.planner.strategy import Strategy

__all__ = ["MOST_GPUS", "remedy"]

MOST_GPUS = 16384
_ALL = ("0", "1", "2", "3", "hsdp")


def remedy(candidates: Sequence[Candidate], scenario: Scenario) -> str:
    """The first change that helps, as a sentence.

    Args:
        candidates: none of which fits.
    """
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
    """Fewer samples, of more backwards: some strategies then hold sums of gradients besides."""
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
    """Twice as many ranks, and so on, that fill nodes."""
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
    """Even one sample on the most GPUs is too much."""
    alone = replace(scenario, samples=1)
    worlds = [scenario.cluster.world, *_worlds(scenario, scenario.cluster.world)]
    least = _least(alone, list(alone.strategies(worlds[-1])))
    assert least is not None
    item = least[1].largest()
    first = "Take GPUs with more memory, or shrink the model, first"
    if item == "activations":
        first = "Shorten the sequences or shrink the model first: one sample is too much"
    return (
        f"{first}; on {worlds[-1]} GPUs, too, {least[0].name} with 1 sample needs "
        f"{gigabytes(least[1].total)}, {least[1].items[item] / least[1].total:.0%} of it {item}."
    )
