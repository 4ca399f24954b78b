"""Memory of a rank in a training step, item by item.

[Note: replayed allocations]
What a rank holds from step to step is arithmetic on the engine's real plan and shards. Added to it
is what exists for a part of a step: activations, gradients that wait for their bucket, buffers
under way. The trace has the order of allocations and gradients, so the replay walks through it with
a small model of each transport's memory beside it, and the peak is where their sum is largest.
Buckets of shared gradients are taken not to arrive before they are waited for, which is the most.
What other ranks of a machine have sent is read where it lies, in memory that they share.

| transport | persistent | for a part of the step |
|---|---|---|
| all-reduce | flat buffers, whose views are the gradients | a gradient until it is packed |
| scattered (stages 1, 2) | shards | likewise; what is sent, and received, of three buckets |
| scattered codes | shards, residuals | likewise, codes; copies of parameters that others read |
| coded | codes sent and received, residuals, flat copies | gradients, until they are zeroed |
| units (stage 3) | shards | gathered units, and gradients under way: group_memory.py |

A CPU's library holds scratch memory beside results, which the trace notes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fastsync.planner.group_memory import Units, share_of
from fastsync.planner.record import Allocations, Mark, Record
from fastsync.planner.strategy import Carrier, Strategy, Unit
from fastsync.reducer.bucket_layout import ALIGNMENT, align_up
from fastsync.reducer.buckets import BucketPlan, PlannedBucket
from fastsync.wire.formats import Format

ITEMS = (
    *("parameters", "gradients", "optimizer state", "master weights"),
    *("communication buffers", "activations", "optimizer workspace", "framework"),
)
# A CPU packs a gradient of so many bytes on arrival (csrc/transport/flat.h).
_EARLY_BYTES = 512 << 10
# Buckets of shared gradients at most (at_a_time() in csrc/comm). In memory one is under way. Others
# may still read one more, but for codes, whose reading is waited for. Devices have one on the way.
_UNDER_WAY, _CODED_IN_MEMORY, _OF_DEVICES = 2, 1, 1
_MUCH_LARGER = 4  # times as much as is asked for (csrc/ops/pool.cpp)
_WIDE = torch.float32.itemsize

# Traces a step of the optimizer on parameters of these shapes and dtypes.
OptimizerTrace = Callable[[list[tuple[tuple[int, ...], torch.dtype]]], Allocations]


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its peak, by item."""

    items: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of all items."""
        return sum(self.items.values())


@dataclass
class _Pool:
    """Buffers as csrc/ops/pool.h gives them: a CPU keeps what is given back, a GPU's allocator has
    a pool of its own."""

    keeps: bool
    free: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        return sum(self.used) + sum(self.free)

    def take(self, size: int) -> int:
        fitting = [kept for kept in self.free if size <= kept < _MUCH_LARGER * size]
        if fitting:
            size = min(fitting)
            self.free.remove(size)
        else:
            self.free = [kept for kept in self.free if kept >= size]
        self.used.append(size)
        return size

    def give(self, size: int) -> None:
        self.used.remove(size)
        if self.keeps:
            self.free.append(size)


class _Transports:
    """Memory of buckets for a part of a step: gradients that wait, and buffers under way."""

    def __init__(
        self, record: Record, strategy: Strategy, plan: BucketPlan, carrier: Carrier
    ) -> None:
        self.plan, self.carrier, self.ranks = plan, carrier, strategy.shards
        self.scattered = any(bucket.shards for bucket in plan.buckets)
        own = [p for b in plan.buckets if _has_own_gradients(b) for p in b.params]
        accumulates = strategy.accumulate > 1
        self.there = float(sum(record.params[p].nbytes for p in own)) if accumulates else 0.0
        self.bucket_of = {p: n for n, bucket in enumerate(plan.buckets) for p in bucket.params}
        self.pool = _Pool(keeps=carrier.on_cpu)
        self.copies = self._copies()
        self.gradients = 0.0  # that are no views of buffers
        self.begin()

    def reaches(self, at: int, mark: Mark) -> float:
        """Do nothing: marks of units do not concern buckets."""
        return 0.0

    def begin(self) -> None:
        """Begin a backward; the pool stays as the last one left it.

        Gradients are None, or the new ones are added to those that are there.
        """
        self.gradients = self.there
        self.missing = [len(bucket.params) for bucket in self.plan.buckets]
        self.waiting = [0.0] * len(self.missing)
        self.sent: dict[int, int] = {}
        self.under_way: list[list[int]] = []  # what is sent, and room for what comes
        self.next = 0

    def _copies(self) -> int:
        """Return the bytes of what other ranks of this machine read updated parameters from, unit
        by unit. Gradients that travel as they are leave buffers of that size; codes are smaller."""
        coded = any(bucket.coded is not None for bucket in self.plan.buckets)
        if self.carrier is not Carrier.MEMORY or not self.scattered or not coded:
            return 0
        regions = [b.shards[0].region * b.dtype.itemsize for b in reversed(self.plan.buckets)]
        pool = _Pool(keeps=True)
        for _ in range(2):  # the second step finds what the first one has left
            for size in regions:
                pool.give(pool.take(size))
        return pool.held

    @property
    def held(self) -> float:
        """Bytes of gradients that wait, and of buffers."""
        return sum(self.waiting) + self.left

    def gradient(self, param: int, size: float) -> float:
        """Add a complete gradient; return its bytes if it is packed and freed at once."""
        number = self.bucket_of[param]
        if _has_own_gradients(self.plan.buckets[number]):
            self.gradients += 0.0 if self.there else size
            return size if self.there else 0.0
        self.missing[number] -= 1
        early = self.carrier.on_cpu and size >= _EARLY_BYTES
        if early:
            self._ensure_sent(number)
        else:
            self.waiting[number] += size
        while self.next < len(self.missing) and self.missing[self.next] == 0:
            self._launch(self.next)
            self.next += 1
        return size if early else 0.0

    @property
    def left(self) -> int:
        """Bytes of buffers that stay after a backward."""
        return self.pool.held + self.copies

    def end(self) -> None:
        """Finish all buckets: the averages have arrived."""
        while self.under_way:
            self._finish()

    def _finish(self) -> None:
        for size in self.under_way.pop(0):
            self.pool.give(size)

    def _most(self, coded_in_memory: bool) -> int:
        if not self.carrier.on_cpu:
            return _OF_DEVICES
        return _CODED_IN_MEMORY if coded_in_memory else _UNDER_WAY

    def _size(self, bucket: PlannedBucket) -> int:
        if bucket.coded is not None:
            return bucket.nbytes
        flags = 2 * len(bucket.params) + 1
        chunk = align_up(bucket.layout.numel // self.ranks + flags, ALIGNMENT)
        chunks = self.ranks - 1 if self.carrier.on_cpu else self.ranks  # CPUs keep their own
        return chunks * chunk * bucket.dtype.itemsize

    def _ensure_sent(self, number: int) -> None:
        if self.scattered and number not in self.sent:
            self.sent[number] = self.pool.take(self._size(self.plan.buckets[number]))

    def _launch(self, number: int) -> None:
        if self.scattered:
            bucket = self.plan.buckets[number]
            size, coded = self._size(bucket), bucket.coded is not None
            in_memory = self.carrier is Carrier.MEMORY
            if len(self.under_way) >= self._most(coded and in_memory):
                self._finish()
            self._ensure_sent(number)
            buffers = [self.sent.pop(number)]
            if coded or not in_memory:
                whole = coded or self.carrier.on_cpu  # else a device has added up what has come
                buffers.append(self.pool.take(size if whole else size // self.ranks))
            self.under_way.append(buffers)
        self.waiting[number] = 0.0


def phases_of(
    record: Record,
    strategy: Strategy,
    planned: tuple[BucketPlan, list[Unit]],
    optimizer: OptimizerTrace,
    carrier: Carrier = Carrier.MEMORY,
    framework: float = 0.0,
) -> tuple[Memory, Memory]:
    """Return the most of forward and backward, and of the optimizer's step, once both have settled.

    Args:
        planned: what `engine_plan` returned for this strategy.
        optimizer: traces a step of it.
        framework: bytes that the device's context and the backend hold.
    """
    kept = _persistent(record, strategy, planned)
    state = _optimizer_of(record, strategy, planned[1], optimizer)
    kept["optimizer state"] = float(state.kept)
    kept["framework"] = framework
    within, after = _peak_within(record, strategy, planned[0], carrier)
    stepping = {**kept, "optimizer workspace": float(state.peak)}
    stepping["activations"] = float(record.inputs)
    for phase, added in ((kept, within), (stepping, after)):
        for name, value in added.items():
            phase[name] += value
    return Memory(kept), Memory(stepping)


def peak_of(phases: tuple[Memory, Memory]) -> Memory:
    """Return the larger one."""
    return max(phases, key=lambda memory: memory.total)


def _persistent(
    record: Record, strategy: Strategy, planned: tuple[BucketPlan, list[Unit]]
) -> dict[str, float]:
    """Return the bytes from step to step, without the optimizer's."""
    plan, units = planned
    items = dict.fromkeys(ITEMS, 0.0)
    items["parameters"] = float(record.nbytes + record.frozen + record.buffers)
    if strategy.stage == 3:
        shard = float(Units(record, strategy, Carrier.MEMORY).shard)
        masters = shard if strategy.masters and _narrow(record) else 0.0
        items["parameters"] = record.frozen + record.buffers + shard - masters
        items["master weights"] = masters
        return items
    if strategy.masters:
        shards = strategy.shards if strategy.stage else 1
        items["master weights"] = _WIDE * _narrow(record) / shards
    if units:
        sizes = [record.params[unit.params[0]].dtype.itemsize for unit in units]
        pairs = list(zip(units, sizes, strict=True))
        items["gradients"] = float(sum(u.region * size for u, size in pairs))
        items["parameters"] = record.frozen + record.buffers + items["gradients"] * strategy.shards
        if strategy.stage == 1 and strategy.accumulate > 1:
            items["gradients"] += record.nbytes
        items["communication buffers"] = float(sum(map(_residual_bytes, plan.buckets)))
        return items
    for bucket in plan.buckets:
        where = "communication buffers" if _has_own_gradients(bucket) else "gradients"
        items[where] += _buffer_bytes(bucket)
    return items


def _has_own_gradients(bucket: PlannedBucket) -> bool:
    """Return whether every rank keeps its gradients, and not as views of its buffer."""
    return not bucket.shards and (bucket.coded is not None or not bucket.views)


def _buffer_bytes(bucket: PlannedBucket) -> float:
    """Return the bytes of a bucket whose gradients every rank keeps."""
    if bucket.coded is None:
        return float(bucket.nbytes)
    found = 2.0 * bucket.nbytes
    flat = 4.0 * sum(bucket.layout.numels)
    layout = bucket.coded.layout
    if bucket.coded.form == "two_shot":
        found += 4.0 * layout.pieces * layout.chunk_numel
    found += flat if bucket.coded.error_feedback else 0.0
    return found + (0.0 if isinstance(bucket.coded.codec, Format) else flat)


def _residual_bytes(bucket: PlannedBucket) -> int:
    """Return the bytes of residuals of a sharded bucket, which each rank feeds back as a whole."""
    if bucket.coded is None or not bucket.coded.error_feedback or bucket.regions is None:
        return 0
    return _WIDE * bucket.regions.ranks * bucket.regions.numel


def _narrow(record: Record) -> int:
    """Return the number of elements in parameters of 16 bits."""
    return sum(p.numel for p in record.params if p.dtype.itemsize == 2)


def _optimizer_of(
    record: Record, strategy: Strategy, units: list[Unit], optimizer: OptimizerTrace
) -> Allocations:
    """Return the optimizer's memory on the rank that holds most: the first, or that of the largest
    piece.

    Masters step on gradients in fp32, which exist during the step. Units step one after the other;
    those of stage 3 have such gradients already.
    """

    def kind(dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if strategy.masters and dtype.itemsize == 2 else dtype

    if not units:
        shards = strategy.shards if strategy.stage else 1
        sizes = [p.shape if shards == 1 else share_of(p, shards) for p in record.params]
        made = optimizer([(s, kind(p.dtype)) for s, p in zip(sizes, record.params, strict=True)])
        there = not strategy.masters or strategy.stage == 3
        wide = 0 if there else _WIDE * _narrow(record) // shards
        return replace(made, peak=made.peak + wide)

    def step_on(unit: Unit, numels: Sequence[int]) -> Allocations:
        owned = [(record.params[p].dtype, n) for p, n in zip(unit.params, numels, strict=True)]
        made = optimizer([((numel,), kind(dtype)) for dtype, numel in owned if numel])
        wide = sum(_WIDE * n for dtype, n in owned if kind(dtype) is not dtype)
        return replace(made, peak=made.peak + wide)

    firsts = [step_on(unit, unit.first) for unit in units]
    others = [step_on(unit, unit.largest) for unit in units if unit.largest != unit.first]
    return Allocations(
        kept=sum(step.kept for step in firsts),
        peak=max(step.peak for step in (*firsts, *others)),
        moved=sum(step.moved for step in firsts),
    )


def _peak_within(
    record: Record, strategy: Strategy, plan: BucketPlan, carrier: Carrier
) -> tuple[dict[str, float], dict[str, float]]:
    """By item: the most that forward and backward add, and what of it is there after them."""
    last = {mark.place: at for at, mark in enumerate(record.marks) if mark.kind == "grad"}
    transports: Units | _Transports
    if strategy.stage == 3:
        transports = Units(record, strategy, carrier)
    else:
        transports = _Transports(record, strategy, plan, carrier)
    best = dict.fromkeys(ITEMS, 0.0)
    for _ in range(2):  # the second step finds the pool that the first one has left
        live, sizes, most = float(record.inputs), {}, -1.0  # type: float, dict[int, float], float
        transports.begin()
        for at, mark in enumerate(record.marks):
            moment = mark.size if mark.kind == "scratch" and carrier.on_cpu else 0.0
            if mark.kind == "alloc":
                sizes[mark.place] = mark.size
                live += mark.size
            elif mark.kind == "free":
                live -= sizes.pop(mark.place, 0.0)
            elif mark.kind == "grad" and last[mark.place] == at:
                moment = transports.gradient(mark.place, mark.size)
            briefly = transports.reaches(at, mark)
            held, gradients = transports.held + briefly, transports.gradients
            if live + moment + held + gradients > most:
                most = live + moment + held + gradients
                best["activations"], best["communication buffers"] = live + moment, held
                best["gradients"] = gradients
        transports.end()
    after = {"communication buffers": float(transports.left)}
    return best, {**after, "gradients": float(transports.gradients)}
