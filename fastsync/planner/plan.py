"""A finished plan: candidates for the GPUs that were asked for, and how they scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastsync.planner.advice import Advice, advise
from fastsync.planner.compute import Compute
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster, Link
from fastsync.planner.quantities import millions
from fastsync.planner.runs import Recorded
from fastsync.planner.scenario import Candidate, Scenario
from fastsync.planner.simulate import StepTime, job_of_messages, job_of_units, simulate
from fastsync.planner.strategy import Strategy

__all__ = ["Plan", "Point", "make_plan_of", "plan_of_run", "saturation"]

_SCALES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)  # of the links' rate
_WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Below this efficiency more GPUs are said to saturate.
SATURATED = 0.8


@dataclass(frozen=True)
class Point:
    """A strategy's step at one number of ranks, or one rate of the links.

    Attributes:
        at: ranks, or the rate over the given one.
    """

    strategy: str
    at: float
    time: StepTime


@dataclass(frozen=True)
class Plan:
    """What is shown.

    Attributes:
        title: model and batch.
        candidates: on as many GPUs as were asked for; empty for recorded runs.
        scaling: over numbers of GPUs; `bandwidth`: over rates of the links.
        sources: where figures of links and devices come from, if from no data sheet.
    """

    title: str
    device: Device
    cluster: Cluster
    compute: Compute
    tokens_per_sample: float
    candidates: tuple[Candidate, ...]
    advice: Advice | None
    scaling: tuple[Point, ...]
    bandwidth: tuple[Point, ...]
    sources: tuple[str, ...] = ()


def _label(strategy: Strategy) -> str:
    """Without the numbers, which differ along an axis."""
    return strategy.name


def make_plan_of(scenario: Scenario, worlds: Sequence[int]) -> Plan:
    """Compares strategies on the first of `worlds`, and follows them over the others.

    Args:
        worlds: numbers of GPUs; with one alone, powers of two up to 16,384 make the picture.
    """
    world = worlds[0]
    candidates = scenario.candidates(world)
    shown = [s for s in scenario.strategies(world) if not s.checkpointing] or list(
        scenario.strategies(world)
    )
    record = scenario.first
    return Plan(
        title=f"{record.model}, {millions(record.numel)} parameters, batch {scenario.samples}",
        device=scenario.device,
        cluster=scenario.cluster.of(world),
        compute=scenario.compute,
        tokens_per_sample=record.tokens / record.samples,
        candidates=tuple(candidates),
        advice=advise(candidates, scenario.device, scenario),
        scaling=tuple(_over_worlds(scenario, shown, worlds)),
        bandwidth=tuple(_over_rates(scenario, shown)),
    )


def _over_worlds(
    scenario: Scenario, shown: Sequence[Strategy], worlds: Sequence[int]
) -> list[Point]:
    per_node = scenario.cluster.per_node
    chosen = worlds if len(worlds) > 1 else _WORLDS
    fitting = [n for n in chosen if n < per_node or n % per_node == 0]
    points = []
    for strategy in shown:
        for world in fitting:
            shards = min(strategy.shards, world) if strategy.hybrid else world
            at = replace(strategy, world=world, shards=shards)
            points.append(Point(_label(strategy), world, scenario.time(at)))
    return points


def _over_rates(scenario: Scenario, shown: Sequence[Strategy]) -> list[Point]:
    points = []
    for scale in _SCALES:
        cluster = _faster(scenario.cluster, scale)
        there = replace(scenario, cluster=cluster)
        points += [Point(_label(s), scale, there.time(s)) for s in shown]
    return points


def _faster(cluster: Cluster, scale: float) -> Cluster:
    def scaled(link: Link) -> Link:
        return replace(link, rate=link.rate * scale)

    return replace(cluster, intra=scaled(cluster.intra), inter=scaled(cluster.inter))


def plan_of_run(
    recorded: Recorded, title: str, device: Device, cluster: Cluster, worlds: Sequence[int]
) -> Plan:
    """Follows a recorded run over numbers of GPUs: its own computation, buckets or units, jitter
    and straggler."""

    def step(kind: int, at: Cluster) -> StepTime:
        strategy = Strategy(kind, at.world, at.world)
        if kind == 3:
            job = job_of_units(recorded.units, strategy, recorded.compute, at)
        else:
            job = job_of_messages(recorded.messages, strategy, recorded.compute, at)
        return simulate(job, recorded.jitter, recorded.straggler)

    kinds = (3,) if recorded.units else (0, 1)
    scaling = [Point(f"zero={k}", n, step(k, cluster.of(n))) for k in kinds for n in worlds]
    at = cluster.of(worlds[0])
    rates = [Point(f"zero={k}", s, step(k, _faster(at, s))) for s in _SCALES for k in kinds]
    return Plan(
        title=title,
        device=device,
        cluster=at,
        compute=recorded.compute,
        tokens_per_sample=0.0,
        candidates=(),
        advice=None,
        scaling=tuple(scaling),
        bandwidth=tuple(rates),
    )


def saturation(points: Sequence[Point], strategy: str) -> float | None:
    """The first number of ranks below `SATURATED`; None: it does not come to that."""
    below = [p.at for p in points if p.strategy == strategy and p.time.efficiency < SATURATED]
    return min(below, default=None)
