"""A training as it was asked for, and every strategy for it: memory and time of each.

[Note: batches between traces]
What a trace notes of a batch grows with it along a line, mark by mark, as long as the model does
the same things: so two traces tell what one of any other batch would note. Their peaks do not grow
along a line, since another moment of the step may become the largest. So the search replays records
on the line through two traces, which is quick, and traces the batch that it has found. If that
shows what was expected, the answer stands; else the search goes on with the new trace and the one
before it. A model that does other things with other batches is traced at every step of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from fastsync.config.sync_modes import DiLoCo, SyncMode
from fastsync.config.topology import Network
from fastsync.planner.hardware import Cluster, Device, collective_seconds, sent_bytes
from fastsync.planner.memory import Memory, OptimizerTrace, peak_of, phases_of
from fastsync.planner.record import Record
from fastsync.planner.step_time import Compute, StepTime, from_record, job_of, simulate
from fastsync.planner.strategy import KINDS, Carrier, Strategy, Unit, engine_plan, named
from fastsync.reducer.bucket_layout import slot_layout
from fastsync.reducer.buckets import BucketPlan
from fastsync.sync.schedule import Schedule

_MOST = 1 << 20  # samples
_TRACES = 12  # that one search makes at most to see whether an answer is right
_SAME = 1e-9  # of a peak, that rounding may take or add
_BEYOND = 2  # times as far as traces lie on one line, it is taken to go on
# Steps that differ by less are alike: plans are not exact to it.
_ALIKE = 0.03


@dataclass
class _Traces:
    """Records of a model by samples, each traced once.

    Attributes:
        trace: makes one.
        sure: samples up to which three traces have been seen to lie on one line.
    """

    trace: Callable[[int], Record]
    made: dict[int, Record] = field(default_factory=dict)
    sure: int = 0

    def record(self, samples: int) -> Record:
        """Return the trace with so many samples."""
        if samples not in self.made:
            self.made[samples] = self.trace(samples)
        return self.made[samples]

    def expected(self, pair: tuple[int, int], samples: int) -> Record:
        """Return that record by the line through a pair of traces, or a trace if they differ."""
        if samples in self.made:
            return self.made[samples]
        one, other = (self.record(each) for each in pair)
        return _between(one, other, samples) or self.record(samples)


def _between(one: Record, other: Record, samples: int) -> Record | None:
    """Return the record of another batch on the line through two.

    None: they differ in more than sizes.
    """
    if len(one.marks) != len(other.marks) or one.params != other.params:
        return None
    part = (samples - one.samples) / (other.samples - one.samples)
    marks = []
    for a, b in zip(one.marks, other.marks, strict=True):
        if a.kind != b.kind or a.place != b.place:
            return None
        if a is not b and a != b:
            size, work = a.size + part * (b.size - a.size), a.work + part * (b.work - a.work)
            a = a._replace(size=max(size, 0.0), work=max(work, 0.0))
        marks.append(a)
    inputs = round(one.inputs + part * (other.inputs - one.inputs))
    return replace(one, samples=samples, inputs=inputs, marks=tuple(marks))


def _largest_batch(
    peak: Callable[[Record], float], traces: _Traces, limit: float, start: int
) -> int:
    """Return the most samples with a peak of at most `limit` bytes; 0: one is too much.

    Where traces never lie on a line, the largest traced one that fits.

    Args:
        start: samples to begin with; it and twice as many are traced.
    """
    pair = (start, 2 * start)
    for _ in range(_TRACES):
        found = _searched(peak, traces, pair, limit)
        guess = max(found, 1)
        if guess in traces.made or guess <= traces.sure:
            return found
        expected = peak(traces.expected(pair, guess))
        if math.isclose(expected, peak(traces.record(guess)), rel_tol=_SAME):
            traces.sure = _BEYOND * guess
            return found
        pair = (pair[1], guess)
    return max((n for n, record in traces.made.items() if peak(record) <= limit), default=0)


def _searched(
    peak: Callable[[Record], float], traces: _Traces, pair: tuple[int, int], limit: float
) -> int:
    """Return the most samples that fit, by the records that a pair of traces lets expect."""
    fits, fails, peaks, wanted = 0, 0, dict[int, float](), pair[0]
    while wanted:
        peaks[wanted] = peak(traces.expected(pair, wanted))
        if peaks[wanted] <= limit:
            fits = wanted
        else:
            fails = wanted
        wanted = _next(peaks, limit, fits, fails)
    return fits


def _next(peaks: dict[int, float], limit: float, fits: int, fails: int) -> int:
    """Return the batch to look at next; 0: the answer is known.

    Args:
        fits: most samples that are known to fit, or 0; `fails`: fewest that are known not to.
    """
    if not fails:
        return 0 if fits >= _MOST else min(_MOST, 8 * fits)
    if fails - fits == 1:
        return 0
    guess = (fits + fails) // 2
    if fits and len(peaks) % 2:  # every other time along the line through both
        part = (limit - peaks[fits]) / (peaks[fails] - peaks[fits])
        guess = fits + int(part * (fails - fits))
    return min(max(guess, fits + 1), fails - 1)


@dataclass(frozen=True)
class StepCost:
    """A step, on average over a round.

    Attributes:
        mean: seconds of it.
        exposed: those of them that it waits.
        sent: bytes that leave a rank.
    """

    mean: float
    exposed: float
    sent: float


def step_cost(
    mode: SyncMode,
    numels: Sequence[int],
    world: int,
    alone: float,
    collective: Callable[[str, float], tuple[float, float]],
) -> StepCost:
    """Return the cost of a step of `world` ranks.

    Args:
        numels: sizes of the parameters.
        alone: seconds of a step that sends nothing.
        collective: seconds of an "all_reduce" or "all_gather", and bytes that leave a rank; by the
            bytes of the whole: what is summed, or what all ranks have after it.
    """
    schedule = Schedule.of(mode)
    codec = mode.codec if isinstance(mode, DiLoCo) else None
    if codec is None:
        kind, nbytes = "all_reduce", 4 * sum(numels)
    else:
        whole = getattr(codec, "whole", False)
        numel = sum(numels) if whole else slot_layout(numels, codec.block).numel
        kind, nbytes = "all_gather", world * codec.coded_bytes(numel)
    seconds, sent = collective(kind, nbytes / schedule.fragments)
    per_step = schedule.fragments / schedule.every
    exposed = per_step * max(0.0, seconds - schedule.overlap * alone)
    if schedule.overlap:  # what is sent in a step has to travel in one
        exposed = max(exposed, per_step * seconds - alone)
    return StepCost(alone + exposed, exposed, per_step * sent)


def choose(steps: Mapping[SyncMode | None, StepCost]) -> SyncMode | None:
    """Return the mode to take, of those that are as fast as the fastest: the one that averages most
    often, and most exactly. None averages at every step.
    """
    fastest = min(cost.mean for cost in steps.values())
    alike = [mode for mode, cost in steps.items() if cost.mean < (1 + _ALIKE) * fastest]
    return min(alike, key=lambda mode: (mode.every if mode else 0, -steps[mode].sent))


@dataclass(frozen=True)
class Candidate:
    """A strategy with what it needs.

    Attributes:
        largest_batch: the most samples per rank that fit, see the note above; 0: one is too much.
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
    _traces: dict[bool, _Traces] = field(default_factory=dict, compare=False)

    def _traced(self, checkpointing: bool) -> _Traces:
        if checkpointing not in self._traces:
            made = _Traces(lambda samples: self.trace(samples, checkpointing))
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
        return _largest_batch(peak, traces, self.device.memory, self.samples)


def cached_optimizer(trace: OptimizerTrace) -> OptimizerTrace:
    """Return the same, which traces equal sizes once."""
    known = cache(lambda sizes: trace(list(sizes)))
    return lambda sizes: known(tuple(sizes))
