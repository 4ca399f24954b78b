"""A training as it was asked for, and every strategy for it: memory and time of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from fastsync.plan.buckets import BucketPlan
from fastsync.plan.policy import BucketPolicy
from fastsync.plan.topology import Network
from fastsync.planner.batches import Traces, largest_batch
from fastsync.planner.compute import Compute, from_record
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster
from fastsync.planner.memory import Memory, OptimizerTrace, peak_of, phases_of
from fastsync.planner.record import Record
from fastsync.planner.simulate import Job, StepTime, job_of, simulate
from fastsync.planner.strategy import Carrier, Strategy, Unit, engine_plan, named

__all__ = ["Candidate", "Scenario", "cached_optimizer"]

# Traces the model with so many samples, with or without checkpointing.
Trace = Callable[[int, bool], Record]


@dataclass(frozen=True)
class Candidate:
    """A strategy with what it needs.

    Attributes:
        largest_batch: the most samples per rank that fit, see batches.py; 0: one is too much.
        samples: that all ranks process in a step.
    """

    strategy: Strategy
    memory: Memory
    time: StepTime
    fits: bool
    largest_batch: int
    samples: int

    @property
    def throughput(self) -> float:
        """Samples per second of all ranks."""
        return self.samples / self.time.mean if self.time.mean else 0.0


@dataclass(frozen=True)
class Scenario:
    """What is trained, on what, and what may be tried.

    Attributes:
        trace: of the model; called again for other batches.
        samples: of a rank's batch.
        optimizer: traces its step.
        kinds: strategies to try: "0", "1", "2", "3", "hsdp".
        wires: wire formats to try, with the stages that can have them.
        checkpointing: whether to try it, and to go without it.
        measured: computing times without checkpointing that replace traced ones.
        jitter: of a rank's speed, see simulate.py.
    """

    trace: Trace
    samples: int
    optimizer: OptimizerTrace
    device: Device
    cluster: Cluster
    kinds: Sequence[str] = ("0", "1", "2", "3", "hsdp")
    wires: Sequence[str] = ("fp32",)
    checkpointing: Sequence[bool] = (False, True)
    accumulate: int = 1
    masters: bool = False
    jitter: float = 0.0
    straggler: float = 1.0
    buckets: BucketPolicy | None = None
    measured: Compute | None = None
    _traces: dict[bool, Traces] = field(default_factory=dict, compare=False)

    def traces(self, checkpointing: bool) -> Traces:
        """Those of every batch, with or without checkpointing."""
        if checkpointing not in self._traces:
            made = Traces(lambda samples: self.trace(samples, checkpointing))
            self._traces[checkpointing] = made
        return self._traces[checkpointing]

    def record(self, samples: int, checkpointing: bool) -> Record:
        """The trace with so many samples; made once."""
        return self.traces(checkpointing).record(samples)

    @property
    def first(self) -> Record:
        """The trace of the batch that was asked for."""
        return self.record(self.samples, False)

    def strategies(self, world: int) -> Iterator[Strategy]:
        """All that make sense on `world` ranks."""
        for checkpointing in self.checkpointing:
            if checkpointing and not self.first.blocks:
                continue
            for kind in self.kinds:
                base = named(kind, world, self.cluster.per_node)
                if kind == "hsdp" and not base.hybrid:
                    continue
                for wire in self.wires:
                    strategy = replace(
                        base,
                        wire=wire,
                        accumulate=self.accumulate,
                        masters=self.masters,
                        checkpointing=checkpointing,
                    )
                    if strategy.possible:
                        yield strategy

    def candidates(self, world: int, with_batches: bool = True) -> list[Candidate]:
        """Memory and time of every strategy on `world` ranks."""
        return [self.candidate(s, with_batches) for s in self.strategies(world)]

    def candidate(self, strategy: Strategy, with_batch: bool = True) -> Candidate:
        """Memory and time of one.

        Args:
            with_batch: find the largest batch as well, which traces the model a few times more.
        """
        memory = self.memory(strategy)
        fits = memory.total <= self.device.memory
        largest = self.largest_batch(strategy) if with_batch else 0
        samples = self.samples * strategy.world * strategy.accumulate
        return Candidate(strategy, memory, self.time(strategy), fits, largest, samples)

    def memory(self, strategy: Strategy) -> Memory:
        """Of a rank at its peak, with the batch that was asked for."""
        return self._peak(strategy, self.record(self.samples, strategy.checkpointing))

    def _peak(self, strategy: Strategy, record: Record) -> Memory:
        """Of a rank with the batch of a record."""
        planned, carrier = self._planned(record, strategy), self._carrier(strategy)
        framework = self.device.framework
        return peak_of(phases_of(record, strategy, planned, self.optimizer, carrier, framework))

    def _planned(self, record: Record, strategy: Strategy) -> tuple[BucketPlan, list[Unit]]:
        network, carrier = self._network(strategy), self._carrier(strategy)
        return engine_plan(record, strategy, network, carrier, self.buckets)

    def _carrier(self, strategy: Strategy) -> Carrier:
        if not self.device.on_cpu:
            return Carrier.DEVICES
        one = self.cluster.of(strategy.world).nodes == 1
        return Carrier.MEMORY if one else Carrier.MESSAGES

    def time(self, strategy: Strategy) -> StepTime:
        """The step of all ranks."""
        return simulate(self.job(strategy), self.jitter, self.straggler)

    def job(self, strategy: Strategy) -> Job:
        """That step, ready to be simulated."""
        record = self.record(self.samples, strategy.checkpointing)
        cluster = self.cluster.of(strategy.world)
        plan, _ = self._planned(record, strategy)
        compute = self._compute(strategy)
        return job_of(record, strategy, plan, compute, cluster, self.device)

    def _compute(self, strategy: Strategy) -> Compute:
        if self.measured is None:
            return self._traced_compute(strategy.checkpointing)
        if not strategy.checkpointing:
            return self.measured
        plain, again = (self._traced_compute(again) for again in (False, True))
        return self.measured.recomputed(again.backward / plain.backward)

    def _traced_compute(self, checkpointing: bool) -> Compute:
        record = self.record(self.samples, checkpointing)
        moved = self.optimizer(_shapes(record)).moved
        return from_record(record, self.device, moved)

    @property
    def compute(self) -> Compute:
        """Of a rank, without checkpointing."""
        return self._compute(named("0", 1, 1))

    def _network(self, strategy: Strategy) -> Network:
        """What the engine's first step would measure, for bytes of gradients."""
        cluster = self.cluster.of(strategy.world)
        if cluster.world == 1:
            return Network()
        factor = 2 * (cluster.world - 1) / cluster.world
        return Network(cluster.rate / factor, cluster.inter.latency or 0.0)

    def largest_batch(self, strategy: Strategy) -> int:
        """The most samples per rank that fit; 0: one is too much."""

        def peak(record: Record) -> float:
            return self._peak(strategy, record).total

        traces = self.traces(strategy.checkpointing)
        return largest_batch(peak, traces, self.device.memory, self.samples)


def _shapes(record: Record) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(param.shape, param.dtype) for param in record.params]


def cached_optimizer(trace: OptimizerTrace) -> OptimizerTrace:
    """The same, which traces equal sizes once."""
    known = cache(lambda sizes: trace(list(sizes)))
    return lambda sizes: known(tuple(sizes))
