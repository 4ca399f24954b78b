"""A training step as events: gradients become ready, buckets leave, collectives end.

[Note: one step]
Collectives of a group run one after the other, in the order of launch. A bucket's starts when the
slowest rank has its gradients and its predecessor is through. All ranks run the same program, each
with a speed of its own in this step: a factor s on everything it computes, drawn from a lognormal
distribution. So the slowest rank is the same for all buckets, and the step of N ranks is that of
one rank with the largest of N draws. Its distribution is known: P(max < x) = P(s < x)^N, so 16,384
ranks cost no more than two. Means are over equally likely quantiles of that distribution.

    stage 0      forward, backward | all-reduces                     , update
    stages 1, 2  forward, backward | reduce-scatters                 , update / N, all-gathers
    stage 3      forward | all-gathers, backward | all-gathers and reduce-scatters, update / N

"|" runs beside. Stage 2 reduces after each backward that accumulates; the others after the last.
At stage 3 a unit's all-gather starts when its predecessor in the order of use begins to compute;
the root's parameters stay from forward to backward, and are gathered once. With groups that share
(HSDP), collectives are those of a group, and an all-reduce of each rank's shard across groups
follows each reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from fastsync.planner.hardware import Cluster, Device, collective_seconds, sent_bytes
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.record import ROOT, Record
from fastsync.planner.strategy import Strategy, coded_units
from fastsync.reducer.buckets import BucketPlan, PlannedBucket

_DRAWS = 25  # quantiles
# Passes of coding over gradients in memory. Where every rank gets the averages: encode, sum,
# encode, decode; where their owners alone do: encode, sum.
_CODE_PASSES, _SCATTER_PASSES = 4.0, 2.0


@dataclass(frozen=True)
class Compute:
    """Seconds of one forward, backward and optimizer's step of a rank.

    Attributes:
        ready: when each gradient is complete, from the start of the backward, by parameter.
        update: of the optimizer's step on all parameters; a rank with a shard takes its part.
        source: where the figures come from, in words.
    """

    forward: float
    backward: float
    ready: tuple[float, ...]
    update: float
    source: str = ""

    def recomputed(self, factor: float) -> Compute:
        """Return the same with a backward `factor` as long, as checkpointing makes it."""
        ready = tuple(at * factor for at in self.ready)
        return replace(self, backward=self.backward * factor, ready=ready)

    def lasting(self, seconds: float) -> Compute:
        """Return the same with measured seconds of a forward and a backward.

        The share of each, the order of gradients and the optimizer's step stay as traced.
        """
        factor = seconds / (self.forward + self.backward)
        made = self.recomputed(factor)
        source = f"measured: {shown_seconds(seconds)} for a forward and a backward"
        return replace(made, forward=factor * self.forward, source=source)


def from_record(record: Record, device: Device, moved_by_update: float) -> Compute:
    """Compute times from operations and traffic of the trace, at the device's efficiencies.

    Args:
        moved_by_update: bytes that the optimizer's step reads and writes.
    """
    dtype = record.params[0].dtype
    now = forward = 0.0
    ready: dict[int, float] = {}
    for mark in record.marks:
        if mark.kind == "op":
            now += device.seconds(mark.work, mark.size, dtype)
        elif mark.kind == "backward":
            forward, now = now, 0.0
        elif mark.kind == "grad":
            ready[mark.place] = now
    source = (
        f"traced, at {device.efficiency:.0%} of {device.name}'s peak and {device.streaming:.0%} of "
        f"its memory's {gigabytes(device.bandwidth)}/s"
    )
    # A parameter without gradient is known to have none when the backward ends.
    times = tuple(ready.get(index, now) for index in range(len(record.params)))
    update = moved_by_update / (device.bandwidth * device.streaming)
    return Compute(forward, now, times, update, source=source)


@dataclass(frozen=True)
class UnitCost:
    """Seconds of a unit's forward, backward, and of its collectives.

    Attributes:
        gathers: before its forward and before its backward; 0: it stays in between.
    """

    forward: float
    backward: float
    gathers: tuple[float, float]
    reduce: float


@dataclass(frozen=True)
class Job:
    """A step, ready to be simulated.

    Attributes:
        ready: when each bucket's gradients are; `costs`: seconds of its collectives, in order.
        after: seconds of collectives after the optimizer's step.
        units: in the order of use in the forward; stage 3 alone.
        sent: bytes that a rank sends in a step.
        coding: seconds of the processor that coding takes from the computation, on a CPU.
    """

    strategy: Strategy
    compute: Compute
    ready: tuple[float, ...] = ()
    costs: tuple[float, ...] = ()
    after: float = 0.0
    units: tuple[UnitCost, ...] = ()
    sent: float = 0.0
    coding: float = 0.0

    @property
    def update(self) -> float:
        """Seconds of a rank's part of the optimizer's step."""
        return self.compute.update / (self.strategy.shards if self.strategy.stage else 1)


@dataclass(frozen=True)
class StepTime:
    """A step in seconds.

    Attributes:
        mean: of the step.
        exposed: by which communication and waiting for slower ranks outlast computation.
        communicating: of all collectives.
        sent: bytes that a rank sends.
        efficiency: share of the step in which a rank computes.
    """

    mean: float
    exposed: float
    computing: float
    communicating: float
    sent: float
    efficiency: float


def job_of(
    record: Record,
    strategy: Strategy,
    plan: BucketPlan,
    compute: Compute,
    cluster: Cluster,
    device: Device,
) -> Job:
    """Return the step of a traced model.

    Args:
        plan: the engine's, for this strategy.
    """
    if strategy.stage == 3:
        return _job_of_units(record, strategy, compute, cluster, device)
    ready, costs, sent, coding = [], [], 0.0, 0.0
    for bucket in plan.buckets:
        ready.append(max(compute.ready[index] for index in bucket.params))
        coded = _coding_seconds(record, bucket, device)
        seconds, bytes_sent = _bucket_cost(bucket, strategy, cluster, coded)
        costs.append(seconds)
        sent += bytes_sent
        coding += coded
    if strategy.stage == 2:
        sent *= strategy.accumulate
        coding *= strategy.accumulate
    after = 0.0
    if strategy.stage:
        count = max(1, len(plan.buckets))
        after = count * collective_seconds("all_gather", record.nbytes / count, cluster)
        sent += sent_bytes("all_gather", record.nbytes, strategy.world)
    taken = coding if device.on_cpu else 0.0
    return Job(strategy, compute, tuple(ready), tuple(costs), after, (), sent, taken)


def _coding_seconds(record: Record, bucket: PlannedBucket, device: Device) -> float:
    """Return the seconds of a rank's work to code a bucket and its sums."""
    if bucket.coded is None:
        return 0.0
    own = sum(record.params[index].nbytes for index in bucket.params)
    passes = _SCATTER_PASSES if bucket.coded.form == "scatter" else _CODE_PASSES
    return passes * own / device.code_rate


def _bucket_cost(
    bucket: PlannedBucket, strategy: Strategy, cluster: Cluster, coding: float
) -> tuple[float, float]:
    """Return the seconds and bytes of a bucket's collectives.

    Args:
        coding: seconds of coding.
    """
    nbytes, world = float(bucket.nbytes), strategy.world
    if bucket.coded is None:
        kind = "reduce_scatter" if strategy.stage and bucket.shards else "all_reduce"
        return collective_seconds(kind, nbytes, cluster), sent_bytes(kind, nbytes, world)
    kinds = {
        "gather": [("all_gather", nbytes * world)],
        "scatter": [("all_to_all", nbytes)],
    }.get(bucket.coded.form, [("all_to_all", nbytes), ("all_gather", nbytes)])
    travelling = sum(collective_seconds(kind, size, cluster) for kind, size in kinds)
    # Pieces of a bucket are coded while others travel; the first and last one's turns show.
    pieces = bucket.coded.layout.pieces
    seconds = max(travelling, coding) + min(travelling, coding) / pieces
    return seconds, sum(sent_bytes(kind, size, world) for kind, size in kinds)


def _job_of_units(
    record: Record, strategy: Strategy, compute: Compute, cluster: Cluster, device: Device
) -> Job:
    sizes: dict[int, float] = {}
    ends: dict[int, float] = {}
    for index, param in enumerate(record.params):
        sizes[param.unit] = sizes.get(param.unit, 0.0) + param.nbytes
        ends[param.unit] = max(ends.get(param.unit, 0.0), compute.ready[index])
    group, shards = cluster.of(strategy.shards), strategy.shards
    codes = coded_units(record, strategy)
    costs, sent, coding, before = [], 0.0, 0.0, 0.0
    for unit in sorted(sizes, key=ends.__getitem__):
        nbytes, backward = sizes[unit], ends[unit] - before
        before = ends[unit]
        kind, travelling = "reduce_scatter", nbytes
        reduce = 0.0
        if unit in codes:
            kind, travelling = "all_to_all", codes[unit]
            reduce = _SCATTER_PASSES * nbytes / device.code_rate
            coding += reduce
        reduce += collective_seconds(kind, travelling, group)
        sent += sent_bytes(kind, travelling, shards)
        if strategy.hybrid:
            across = nbytes / shards
            reduce += collective_seconds("all_reduce", across, cluster.across())
            sent += sent_bytes("all_reduce", across, cluster.nodes)
        gather = collective_seconds("all_gather", nbytes, group)
        sent += (1 if unit == ROOT else 2) * sent_bytes("all_gather", nbytes, shards)
        gathers = (gather, 0.0 if unit == ROOT else gather)
        forward = compute.forward * backward / max(compute.backward, 1e-12)
        costs.append(UnitCost(forward, backward, gathers, reduce))
    rounds = strategy.accumulate
    taken = rounds * coding if device.on_cpu else 0.0
    return Job(strategy, compute, units=tuple(reversed(costs)), sent=rounds * sent, coding=taken)


def simulate(job: Job, jitter: float = 0.0) -> StepTime:
    """Return the step of all ranks.

    Args:
        jitter: standard deviation of the logarithm of a rank's speed, from step to step.
    """
    step = _of_units if job.units else _of_buckets
    speeds = [1.0]
    if jitter:
        normal, world = NormalDist(), job.strategy.world
        quantiles = (((draw + 0.5) / _DRAWS) ** (1 / world) for draw in range(_DRAWS))
        speeds = [math.exp(jitter * normal.inv_cdf(min(q, 1 - 1e-15))) for q in quantiles]
    mean = sum(step(job, slow) for slow in speeds) / len(speeds)
    own = job.strategy.accumulate * (job.compute.forward + job.compute.backward)
    computing = own + job.update
    rounds = job.strategy.accumulate if job.strategy.stage == 2 else 1
    communicating = rounds * sum(job.costs) + job.after
    if job.units:
        communicating = job.strategy.accumulate * sum(sum(u.gathers) + u.reduce for u in job.units)
    hidden = max(0.0, communicating - max(0.0, mean - computing))
    mean += job.coding * hidden / communicating if communicating else 0.0
    return StepTime(
        mean=mean,
        exposed=mean - computing,
        computing=computing,
        communicating=communicating,
        sent=job.sent,
        efficiency=computing / mean if mean else 1.0,
    )


def _of_buckets(job: Job, slow: float) -> float:
    forward, backward = slow * job.compute.forward, slow * job.compute.backward
    through = 0.0  # when the last bucket is, from the start of the backward
    for at, cost in zip(job.ready, job.costs, strict=True):
        through = max(through, slow * at) + cost
    synchronised = forward + max(backward, through)
    others = job.strategy.accumulate - 1
    local = synchronised if job.strategy.stage == 2 else forward + backward
    return others * local + synchronised + slow * job.update + job.after


def _of_units(job: Job, slow: float) -> float:
    one = _walk(job.units, slow, False) + _walk(tuple(reversed(job.units)), slow, True)
    return job.strategy.accumulate * one + slow * job.update


def _walk(units: Sequence[UnitCost], slow: float, backward: bool) -> float:
    """Return the seconds of a forward or backward of units in this order.

    One lane computes, the other communicates.
    """
    computed = link = there = units[0].gathers[backward]
    for at, unit in enumerate(units):
        begun = max(computed, there)
        there = 0.0
        if at + 1 < len(units) and (gather := units[at + 1].gathers[backward]):
            there = link = max(link, begun) + gather
        computed = begun + slow * (unit.backward if backward else unit.forward)
        if backward and unit.reduce:
            link = max(link, computed) + unit.reduce
    return max(link, computed) if backward else computed
