"""How long a rank computes in a step, and when its gradients are ready: traced or recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from fastsync.planner.devices import Device
from fastsync.planner.record import Record
from fastsync.timeline.data import RankStep, Run, by_step

__all__ = ["Compute", "Message", "Recorded", "from_record", "from_run"]

_NS = 1e-9
_UPDATE_OPERATORS = 12  # of AdamW on a parameter, where each is launched by itself, as on a CPU


@dataclass(frozen=True)
class Compute:
    """Seconds of one forward, backward and optimizer's step of a rank.

    Attributes:
        ready: when each gradient is complete, from the start of the backward, by parameter.
        update: of the optimizer's step on all parameters; a rank with a share takes its share.
        launches: of that step at least on pieces of all parameters, however small they are.
        between: of whatever else lies between two steps.
        source: where the figures come from, in words.
    """

    forward: float
    backward: float
    ready: tuple[float, ...]
    update: float
    between: float = 0.0
    source: str = ""
    launches: float = 0.0

    def scaled(self, factor: float) -> Compute:
        """The same for a batch `factor` as large."""
        return Compute(
            self.forward * factor,
            self.backward * factor,
            tuple(at * factor for at in self.ready),
            self.update,
            self.between,
            self.source,
            self.launches,
        )

    def recomputed(self, factor: float) -> Compute:
        """The same with a backward `factor` as long, as checkpointing makes it."""
        ready = tuple(at * factor for at in self.ready)
        return replace(self, backward=self.backward * factor, ready=ready)

    def as_recorded(self, recorded: Compute) -> Compute:
        """This traced one, as long as the recorded passes: its gradients keep their order."""
        factor = recorded.backward / self.backward if self.backward else 1.0
        return replace(
            self.recomputed(factor),
            forward=recorded.forward,
            backward=recorded.backward,
            between=max(0.0, recorded.between - self.update),
            source=f"{recorded.source}; order of gradients and the optimizer's step: traced",
        )


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
class Recorded:
    """A recorded run as plans read it.

    Attributes:
        messages: its buckets.
        world: ranks of it.
        jitter: standard deviation of a rank's computing time over its median.
    """

    compute: Compute
    messages: tuple[Message, ...]
    world: int
    jitter: float


def from_record(record: Record, device: Device, moved_by_update: float) -> Compute:
    """From operations and traffic of the trace, at the device's stated efficiencies.

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
    update = moved_by_update / (device.bandwidth * device.streaming)
    source = (
        f"traced: {record.flops / 1e12:.3g} TFLOP a step at {device.efficiency:.0%} of "
        f"{device.name}'s {device.peak(dtype) / 1e12:.0f} TFLOP/s, and memory traffic at "
        f"{device.streaming:.0%} of {device.bandwidth / 1e12:.2f} TB/s"
    )
    # A parameter without gradient is known to have none when the backward ends.
    times = tuple(ready.get(index, now) for index in range(len(record.params)))
    launches = _UPDATE_OPERATORS * len(record.params) * device.overhead
    return Compute(forward, now, times, max(update, launches), source=source, launches=launches)


def from_run(run: Run) -> Recorded:
    """From a timeline that FastDDP recorded: medians over steps and ranks.

    Raises:
        ValueError: it holds no complete step, or none with buckets.
    """
    steps = by_step(run)
    if not steps:
        raise ValueError("the recording holds no step that is complete on every rank")
    every = [step for ranks in steps.values() for step in ranks]
    latest = [step for step in every if step.plan == every[-1].plan and step.buckets]
    if not latest:
        raise ValueError("the recording holds no step with buckets: was it made by one rank?")
    backward = median(_NS * (s.backward_end - s.backward_start) for s in latest)
    forward = median(sum(_NS * (b - a) for a, b in s.forwards) for s in latest)
    messages = tuple(_message(latest, number) for number in range(len(latest[0].buckets)))
    source = (
        f"recorded: {len(steps)} steps of {run.model} on {run.world_size} ranks, "
        f"{run.backend} on {run.device}"
    )
    between = _between(list(steps.values()))
    ready = tuple(message.ready for message in messages)
    compute = Compute(forward, backward, ready, 0.0, between, source)
    return Recorded(compute, messages, run.world_size, _jitter(latest))


def _message(steps: Sequence[RankStep], number: int) -> Message:
    buckets = [(step, step.buckets[number]) for step in steps if number < len(step.buckets)]
    ready = median(_NS * (bucket.launched - step.backward_start) for step, bucket in buckets)
    return Message(ready, float(buckets[0][1].bytes))


def _between(steps: Sequence[Sequence[RankStep]]) -> float:
    """Seconds from a step's averages to the next forward, where steps follow each other."""
    gaps = [
        _NS * (later.start - earlier.end)
        for before, after in pairwise(steps)
        for earlier, later in zip(before, after, strict=True)
        if later.step == earlier.step + 1
    ]
    return max(0.0, median(gaps)) if gaps else 0.0


def _jitter(steps: Sequence[RankStep]) -> float:
    """The median deviation from the median, as the standard deviation of normal numbers."""
    times = [step.computing for step in steps]
    middle = median(times)
    return 1.4826 * median(abs(time - middle) for time in times) / middle if middle else 0.0
