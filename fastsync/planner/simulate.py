"""A training step as events: gradients become ready, buckets leave, collectives end.

[Note: one step]
Collectives of a group run one after the other, in the order of launch. A bucket's starts when the
slowest rank has its gradients and its predecessor is through. All ranks run the same program, each
with a speed of its own in this step: a factor s on everything it computes, drawn from a lognormal
distribution. So the slowest rank is the same for all buckets, and the step of N ranks is that of
one rank with the largest of N draws. Its distribution is known: P(max < x) = P(s < x)^N, so 16,384
ranks cost no more than two. Means are over equally likely quantiles of that distribution.
A straggler's draws are multiplied: P(max < x) = P(s < x / f) P(s < x)^(N-1).

    stage 0      forward, backward | all-reduces                     , update
    stages 1, 2  forward, backward | reduce-scatters                 , update / N, all-gathers
    stage 3      forward | all-gathers, backward | all-gathers and reduce-scatters, update / N

"|" runs beside. Stage 2 reduces after each backward that accumulates; the others after the last.
The passes of stage 3 are those of unit_steps.py.
With groups that share (HSDP), collectives are those of a group, and an all-reduce of each rank's
shard across groups follows each reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fastsync.plan.buckets import BucketPlan, PlannedBucket
from fastsync.planner.compute import Compute
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster, collective_seconds, sent_bytes
from fastsync.planner.record import Record
from fastsync.planner.strategy import Strategy
from fastsync.planner.unit_steps import (
    SCATTER_PASSES,
    UnitCost,
    UnitWork,
    traced_units,
    walk,
)

__all__ = ["Job", "Message", "StepTime", "job_of", "job_of_messages", "job_of_units", "simulate"]

_DRAWS = 25  # quantiles
_HALVINGS = 50
# Passes of coding over a bucket's gradients in memory, where every rank gets the averages: encode,
# sum, encode, decode.
_CODE_PASSES = 4.0


@dataclass(frozen=True)
class Message:
    """What is handed to collectives at once.

    Attributes:
        ready: seconds after the start of the backward.
        nbytes: of gradients, as they travel.
    """

    ready: float
    nbytes: float


@dataclass(frozen=True)
class Job:
    """A step, ready to be simulated.

    Attributes:
        costs: seconds of each bucket's collectives, in order; `ready`: when its gradients are.
        after: seconds of collectives after the optimizer's step.
        units: in the order of use in the forward; stage 3 alone.
        sent: bytes that a rank sends in a step; `launched`: its collectives; `handled`: tensors
            that are packed or unpacked for them.
        host: seconds of computing that sending costs, where both share a processor; `packing`:
            that tensors cost, whether or not anything is hidden.
    """

    strategy: Strategy
    compute: Compute
    ready: tuple[float, ...]
    costs: tuple[float, ...]
    after: float
    units: tuple[UnitCost, ...]
    sent: float
    launched: int
    handled: int
    host: float
    packing: float

    @property
    def update(self) -> float:
        """Seconds of a rank's part of the optimizer's step.

        A share of stages 1 and 2 has whole tensors, but for those that are cut; one of stage 3 has
        a piece of each, which takes an operator as many launches.
        """
        shards = self.strategy.shards if self.strategy.stage else 1
        least = min(self.compute.update, self.compute.launches)
        return max(self.compute.update / shards, least if self.strategy.stage == 3 else 0.0)


@dataclass(frozen=True)
class StepTime:
    """A step in seconds.

    Attributes:
        mean, late: of the step; one in twenty takes longer than `late`.
        exposed: by which communication and waiting for slower ranks outlast computation.
        communicating: of all collectives.
        sent: bytes that a rank sends.
        efficiency: share of the step in which a rank computes.
    """

    mean: float
    late: float
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
    """The step of a traced model.

    Args:
        plan: the engine's, for this strategy.
    """
    if strategy.stage == 3:
        works = traced_units(record, strategy, compute, device)
        return job_of_units(works, strategy, compute, cluster, device)
    ready, costs, sent, coding, launched, handled = [], [], 0.0, 0.0, 0, 0
    for bucket in plan.buckets:
        ready.append(max(compute.ready[index] for index in bucket.params))
        coded = _coding_seconds(record, bucket, device)
        seconds, bytes_sent = _bucket_cost(bucket, strategy, cluster, coded)
        costs.append(seconds)
        sent += bytes_sent
        coding += coded
        launched += _launched(bucket)
        handled += len(bucket.params)
    if strategy.stage == 2:
        sent *= strategy.accumulate
        coding *= strategy.accumulate
        launched *= strategy.accumulate
        handled *= strategy.accumulate
    whole = record.nbytes
    after = 0.0
    if strategy.stage:
        count = max(1, len(plan.buckets))
        after = count * collective_seconds("all_gather", whole / count, cluster)
        sent += sent_bytes("all_gather", whole, strategy.world)
        launched += count
    host = device.sending * sent + device.launching * launched
    host += coding if device.on_cpu else 0.0
    lost = (sent, launched, handled, host, device.handling * handled)
    return Job(strategy, compute, tuple(ready), tuple(costs), after, (), *lost)


def job_of_messages(
    messages: Sequence[Message], strategy: Strategy, compute: Compute, cluster: Cluster
) -> Job:
    """The step of a recorded run, whose buckets stay as they were; stages 0 to 2."""
    kind = "reduce_scatter" if strategy.stage else "all_reduce"
    costs = tuple(collective_seconds(kind, message.nbytes, cluster) for message in messages)
    sent = sum(sent_bytes(kind, message.nbytes, strategy.world) for message in messages)
    after = 0.0
    if strategy.stage:
        after = sum(collective_seconds("all_gather", m.nbytes, cluster) for m in messages)
        sent *= 2
    ready = tuple(message.ready for message in messages)
    return Job(strategy, compute, ready, costs, after, (), sent, len(costs), 0, 0.0, 0.0)


def _coding_seconds(record: Record, bucket: PlannedBucket, device: Device) -> float:
    """A rank's work to code a bucket and its sums."""
    if bucket.coded is None:
        return 0.0
    own = sum(record.params[index].nbytes for index in bucket.params)
    passes = SCATTER_PASSES if bucket.coded.form == "scatter" else _CODE_PASSES
    return passes * own / device.code_rate


def _launched(bucket: PlannedBucket) -> int:
    """Collectives of a bucket."""
    return 1 if bucket.coded is None or bucket.coded.form in ("gather", "scatter") else 2


def _bucket_cost(
    bucket: PlannedBucket, strategy: Strategy, cluster: Cluster, coding: float
) -> tuple[float, float]:
    """Seconds and bytes of a bucket's collectives.

    Args:
        coding: seconds of coding.
    """
    nbytes, world = float(bucket.nbytes), strategy.world
    if bucket.coded is None:
        kind = "reduce_scatter" if strategy.stage and bucket.shards else "all_reduce"
        return collective_seconds(kind, nbytes, cluster), sent_bytes(kind, nbytes, world)
    if bucket.coded.form == "gather":
        gathered = nbytes * world
        kinds = [("all_gather", gathered)]
    elif bucket.coded.form == "scatter":
        kinds = [("all_to_all", nbytes)]
    else:
        kinds = [("all_to_all", nbytes), ("all_gather", nbytes)]
    travelling = sum(collective_seconds(kind, size, cluster) for kind, size in kinds)
    # Pieces of a bucket are coded while others travel; the first and last one's turns show.
    pieces = bucket.coded.layout.pieces
    seconds = max(travelling, coding) + min(travelling, coding) / pieces
    return seconds, sum(sent_bytes(kind, size, world) for kind, size in kinds)


def job_of_units(
    works: Sequence[UnitWork],
    strategy: Strategy,
    compute: Compute,
    cluster: Cluster,
    device: Device | None = None,
) -> Job:
    """The step of stage 3.

    Args:
        works: in the order of the backward.
        device: what sending costs it; None: it is a part of what was recorded.
    """
    rounds = strategy.accumulate
    costs = [work.cost(strategy, cluster) for work in works]
    sent = rounds * sum(work.sent(strategy, cluster) for work in works)
    launched = rounds * sum(work.collectives for work in works)
    handled = rounds * sum(work.collectives * work.tensors for work in works)
    host = packing = 0.0
    on_cpu = cluster.backend == "gloo" if device is None else device.on_cpu
    if device is not None:
        coding = rounds * sum(work.coding or 0.0 for work in works)
        host = device.sending * sent + device.launching * launched + (coding if on_cpu else 0.0)
        packing = device.handling * handled
    units = tuple(reversed(costs))
    lost = (sent, launched, handled, host, packing)
    return Job(strategy, compute, (), (), 0.0, units, *lost)


def _slowest(world: int, jitter: float, straggler: float) -> list[float]:
    """Equally likely values of the largest of `world` lognormal speeds with median 1, of which one
    is multiplied by `straggler`."""
    if jitter == 0:
        return [straggler]
    normal = NormalDist()
    quantiles = [(draw + 0.5) / _DRAWS for draw in range(_DRAWS)]
    if straggler == 1:
        each = (min(q ** (1 / world), 1 - 1e-15) for q in quantiles)
        return [math.exp(jitter * normal.inv_cdf(q)) for q in each]

    def below(log: float) -> float:
        """The share of steps in which all ranks are faster."""
        alone = normal.cdf((log - math.log(straggler)) / jitter)
        return alone * normal.cdf(log / jitter) ** (world - 1)

    most = math.log(straggler) + 10 * jitter
    return [math.exp(_crossing(below, q, -10 * jitter, most)) for q in quantiles]


def _crossing(rising: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a rising function comes to `level`, by bisection."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < level else (low, middle)
    return (low + high) / 2


def simulate(job: Job, jitter: float = 0.0, straggler: float = 1.0) -> StepTime:
    """The step of all ranks.

    Args:
        jitter: standard deviation of the logarithm of a rank's speed, from step to step.
        straggler: what one rank always takes, in times of the others'.
    """
    step = _of_units if job.units else _of_buckets
    lengths = [step(job, slow) for slow in _slowest(job.strategy.world, jitter, straggler)]
    mean = sum(lengths) / len(lengths)
    own = job.strategy.accumulate * (job.compute.forward + job.compute.backward)
    computing = own + job.update + job.compute.between
    rounds = job.strategy.accumulate if job.strategy.stage == 2 else 1
    communicating = rounds * sum(job.costs) + job.after
    if job.units:
        communicating = job.strategy.accumulate * sum(sum(u.gathers) + u.reduce for u in job.units)
    hidden = max(0.0, communicating - max(0.0, mean - computing))
    lost = job.packing + (job.host * hidden / communicating if communicating else 0.0)
    mean += lost
    return StepTime(
        mean=mean,
        late=lengths[math.ceil(0.95 * len(lengths)) - 1] + lost,
        exposed=mean - computing,
        computing=computing,
        communicating=communicating,
        sent=job.sent,
        efficiency=computing / mean if mean else 1.0,
    )


def _through(ready: Sequence[float], costs: Sequence[float], slow: float) -> float:
    """When the last of the buckets is through, from the start of the backward."""
    now = 0.0
    for at, cost in zip(ready, costs, strict=True):
        now = max(now, slow * at) + cost
    return now


def _of_buckets(job: Job, slow: float) -> float:
    forward, backward = slow * job.compute.forward, slow * job.compute.backward
    synchronised = forward + max(backward, _through(job.ready, job.costs, slow))
    others = job.strategy.accumulate - 1
    local = synchronised if job.strategy.stage == 2 else forward + backward
    return others * local + synchronised + slow * (job.update + job.compute.between) + job.after


def _of_units(job: Job, slow: float) -> float:
    one = walk(job.units, slow)
    one += walk(tuple(reversed(job.units)), slow, backward=True)
    return job.strategy.accumulate * one + slow * (job.update + job.compute.between)
