"""How long a rank computes in a step, and when its gradients are ready."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastsync.planner.devices import Device
from fastsync.planner.quantities import gigabytes, operations
from fastsync.planner.record import Record

__all__ = ["Compute", "from_record"]

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
        f"traced: {operations(record.flops)} a step at {device.efficiency:.0%} of "
        f"{device.name}'s {operations(device.peak(dtype))}/s, and memory traffic at "
        f"{device.streaming:.0%} of {gigabytes(device.bandwidth)}/s"
    )
    # A parameter without gradient is known to have none when the backward ends.
    times = tuple(ready.get(index, now) for index in range(len(record.params)))
    launches = _UPDATE_OPERATORS * len(record.params) * device.overhead
    return Compute(forward, now, times, max(update, launches), source=source, launches=launches)
