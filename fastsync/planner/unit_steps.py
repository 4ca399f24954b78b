"""The passes of stage 3: what each unit computes, gathers and reduces, and how long they take.

Two lanes: one computes, one communicates. A unit's all-gather starts when its predecessor in the
order of use begins to compute. The root's parameters stay from forward to backward, and are
gathered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.planner.compute import Compute
from fastsync.planner.devices import Device
from fastsync.planner.links import Cluster, collective_seconds, sent_bytes
from fastsync.planner.record import Record
from fastsync.planner.strategy import Strategy
from fastsync.planner.unit_codes import coded_units
from fastsync.planner.unit_marks import ROOT

__all__ = [
    "SCATTER_PASSES",
    "UnitCost",
    "UnitWork",
    "traced_units",
    "walk",
]

# Passes of coding over gradients in memory, where their owners alone get averages: encode, sum.
SCATTER_PASSES = 2.0


@dataclass(frozen=True)
class UnitWork:
    """What a unit takes of a rank in one forward and backward, whatever the links are.

    Attributes:
        forward, backward: seconds of computing.
        nbytes: of its whole parameters; `travelling`: of all ranks' parts of its gradients, as
            they are reduced; 0: it has none.
        coding: seconds of coding these; None: they travel as they are.
        stays: its parameters do, from forward to backward.
        tensors: that are packed or unpacked for each collective.
    """

    forward: float
    backward: float
    nbytes: float
    travelling: float
    coding: float | None = None
    stays: bool = False
    tensors: int = 0

    @property
    def collectives(self) -> int:
        """Gathers and reductions."""
        return (1 if self.stays else 2) + (self.travelling > 0)

    def sent(self, strategy: Strategy, cluster: Cluster) -> float:
        """Bytes that a rank sends."""
        gathered = sent_bytes("all_gather", self.nbytes, strategy.shards)
        across = self.nbytes / strategy.shards
        summed = sent_bytes("all_reduce", across, cluster.nodes) if strategy.hybrid else 0.0
        reduced = sent_bytes(self._reduction, self.travelling, strategy.shards)
        return (1 if self.stays else 2) * gathered + reduced + summed

    def cost(self, strategy: Strategy, cluster: Cluster) -> UnitCost:
        """What its collectives take."""
        group = cluster.of(strategy.shards)
        reduce = self.coding or 0.0
        if self.travelling:
            reduce += collective_seconds(self._reduction, self.travelling, group)
        if strategy.hybrid:
            across = self.nbytes / strategy.shards
            reduce += collective_seconds("all_reduce", across, cluster.across())
        gather = collective_seconds("all_gather", self.nbytes, group)
        gathers = (gather, 0.0 if self.stays else gather)
        return UnitCost(self.forward, self.backward, gathers, reduce)

    @property
    def _reduction(self) -> str:
        return "reduce_scatter" if self.coding is None else "all_to_all"


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


def traced_units(
    record: Record, strategy: Strategy, compute: Compute, device: Device
) -> list[UnitWork]:
    """The units of a traced model, in the order of the backward."""
    sizes: dict[int, float] = {}
    ends: dict[int, float] = {}
    tensors = Counter(param.unit for param in record.params)
    for index, param in enumerate(record.params):
        sizes[param.unit] = sizes.get(param.unit, 0.0) + param.nbytes
        ends[param.unit] = max(ends.get(param.unit, 0.0), compute.ready[index])
    codes, works, before = coded_units(record, strategy), [], 0.0
    for unit in sorted(sizes, key=ends.__getitem__):
        backward, before = ends[unit] - before, ends[unit]
        works.append(
            UnitWork(
                forward=compute.forward * backward / max(compute.backward, 1e-12),
                backward=backward,
                nbytes=sizes[unit],
                travelling=codes.get(unit, sizes[unit]),
                coding=SCATTER_PASSES * sizes[unit] / device.code_rate if unit in codes else None,
                stays=unit == ROOT,
                tensors=tensors[unit],
            )
        )
    return works


def walk(units: Sequence[UnitCost], slow: float, backward: bool = False) -> float:
    """Seconds of a forward or backward of units in this order, on ranks that compute for `slow`
    times as long."""
    computed = arrived = link = units[0].gathers[backward]
    for unit, following in zip(units, [*units[1:], None], strict=True):
        begun = max(computed, arrived)
        gather = 0.0 if following is None else following.gathers[backward]
        link = max(link, begun) + gather if gather else link
        arrived = link if gather else 0.0
        computed = begun + slow * (unit.backward if backward else unit.forward)
        if backward and unit.reduce:
            link = max(link, computed) + unit.reduce
    return max(link, computed) if backward else computed
