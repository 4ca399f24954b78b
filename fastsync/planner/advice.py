"""The fastest strategy that fits and why, or what to change where nothing fits.

Remedies are planned before they are named: another batch first, then more GPUs. Where neither
helps, the advice says what fills the memory however many GPUs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastsync.planner.memory import Memory
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.scenario import Candidate, Scenario
from fastsync.planner.strategy import Strategy

__all__ = ["MOST_GPUS", "advise"]

MOST_GPUS = 16384
# Steps that differ by less count as equally fast: simpler is better, and plans are not exact to it.
_ALIKE = 0.03


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
