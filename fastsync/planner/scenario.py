"""A training as it was asked for, and every strategy for it: memory and time of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from fastsync.config.sync_modes import SyncMode
from fastsync.config.topology import Network
from fastsync.planner.batches import Traces, largest_batch
from fastsync.planner.hardware import Cluster, Device, collective_seconds, sent_bytes
from fastsync.planner.memory import Memory, OptimizerTrace, peak_of, phases_of
from fastsync.planner.record import Record
from fastsync.planner.step_time import Compute, StepTime, from_record, job_of, simulate
from fastsync.planner.strategy import KINDS, Carrier, Strategy, Unit, engine_plan, named
from fastsync.reducer.buckets import BucketPlan
from fastsync.sync.costs import StepCost, step_cost

__all__ = ["Candidate", "Scenario", "cached_optimizer"]


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
    """A training, its hardware, and what may be tried.

    Attributes:
        trace: traces the model with so many samples, with or without checkpointing.
        samples: of a rank's batch.
        optimizer: traces its step.
        wires: wire formats to try, with the stages that can have them.
        measured: computing times without checkpointing that replace traced ones.
        jitter: spread of a rank's speed, see step_time.py.
        modes: of `sync=`, beside averages at every step.
    """

    trace: Callable[[int, bool], Record]
    samples: int
    optimizer: OptimizerTrace
    device: Device
    cluster: Cluster
    wires: Sequence[str] = ("fp32",)
    accumulate: int = 1
    masters: bool = False
    jitter: float = 0.0
    measured: Compute | None = None
    modes: Sequence[SyncMode] = ()
    _traces: dict[bool, Traces] = field(default_factory=dict, compare=False)

    def _traced(self, checkpointing: bool) -> Traces:
        if checkpointing not in self._traces:
            made = Traces(lambda samples: self.trace(samples, checkpointing))
            self._traces[checkpointing] = made
        return self._traces[checkpointing]

    def record(self, checkpointing: bool = False) -> Record:
        """Return the trace of the batch that was asked for; made once."""
        return self._traced(checkpointing).record(self.samples)

    def strategies(self, world: int) -> Iterator[Strategy]:
        """All that make sense on `world` ranks."""
        for checkpointing in (False, True) if self.record().blocks else (False,):
            for kind in KINDS:
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

    def candidate(self, strategy: Strategy) -> Candidate:
        """Memory, time and largest batch of one strategy."""
        memory = self.memory(strategy)
        fits = memory.total <= self.device.memory
        samples = self.samples * strategy.world * strategy.accumulate
        largest = self.largest_batch(strategy)
        return Candidate(strategy, memory, self.time(strategy), fits, largest, samples)

    def memory(self, strategy: Strategy) -> Memory:
        """Return the memory of a rank at its peak, with the batch that was asked for."""
        return self._peak(strategy, self.record(strategy.checkpointing))

    def _peak(self, strategy: Strategy, record: Record) -> Memory:
        planned, carrier = self._planned(record, strategy), self._carrier(strategy)
        framework = self.device.framework
        return peak_of(phases_of(record, strategy, planned, self.optimizer, carrier, framework))

    def _planned(self, record: Record, strategy: Strategy) -> tuple[BucketPlan, list[Unit]]:
        cluster, network = self.cluster.of(strategy.world), Network()
        if cluster.world > 1:  # what the engine's first step would measure, for bytes of gradients
            factor = 2 * (cluster.world - 1) / cluster.world
            network = Network(cluster.rate / factor, cluster.inter.latency or 0.0)
        return engine_plan(record, strategy, network, self._carrier(strategy))

    def _carrier(self, strategy: Strategy) -> Carrier:
        if not self.device.on_cpu:
            return Carrier.DEVICES
        one = self.cluster.of(strategy.world).nodes == 1
        return Carrier.MEMORY if one else Carrier.MESSAGES

    def time(self, strategy: Strategy) -> StepTime:
        """Time of the step of all ranks."""
        record, cluster = self.record(strategy.checkpointing), self.cluster.of(strategy.world)
        plan, _ = self._planned(record, strategy)
        compute = self.compute(strategy.checkpointing)
        return simulate(job_of(record, strategy, plan, compute, cluster, self.device), self.jitter)

    def in_mode(self, mode: SyncMode, world: int) -> StepCost:
        """Cost of a step of stage 0 whose gradients stay on their ranks."""
        base = Strategy(0, 1, 1, accumulate=self.accumulate, masters=self.masters)
        sizes, cluster = [param.numel for param in self.record().params], self.cluster.of(world)

        def collective(kind: str, nbytes: float) -> tuple[float, float]:
            return collective_seconds(kind, nbytes, cluster), sent_bytes(kind, nbytes, world)

        return step_cost(mode, sizes, world, self.time(base).mean, collective)

    def compute(self, checkpointing: bool = False) -> Compute:
        """Return the computing times of a rank."""
        if self.measured is None:
            return self._traced_compute(checkpointing)
        if not checkpointing:
            return self.measured
        plain, again = (self._traced_compute(again) for again in (False, True))
        return self.measured.recomputed(again.backward / plain.backward)

    def _traced_compute(self, checkpointing: bool) -> Compute:
        record = self.record(checkpointing)
        moved = self.optimizer([(param.shape, param.dtype) for param in record.params]).moved
        return from_record(record, self.device, moved)

    def largest_batch(self, strategy: Strategy) -> int:
        """Return the most samples per rank that fit; 0: one is too much."""

        def peak(record: Record) -> float:
            return self._peak(strategy, record).total

        traces = self._traced(strategy.checkpointing)
        return largest_batch(peak, traces, self.device.memory, self.samples)


def cached_optimizer(trace: OptimizerTrace) -> OptimizerTrace:
    """Return the same, which traces equal sizes once."""
    known = cache(lambda sizes: trace(list(sizes)))
    return lambda sizes: known(tuple(sizes))
