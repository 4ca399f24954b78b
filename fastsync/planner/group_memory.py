"""Memory of stage 3 in a step: units that come and go, their buffers, and gradients.

[Note: replayed units]
The replay follows fastsync/fsdp/ call by call. A unit is gathered ahead of time: while the one
before it computes or, in messages of a CPU's, right after that one's gather has begun. The root's
stays until its backward is over, any other goes after its forward. Gradients leave when a backward
is through with their unit, at the latest at its end, and one unit's are under way while the next
one computes. Large ones are kept until they have been added up, which is taken to be when a rank
waits for it. On one machine they are copied for the others, and go at once: a rank begins its sums
with its own part, from the third rank on with a copy of it. A gather there takes memory when the
unit is wanted, as until then shares lie where they were written.

Memory goes from unit to unit through a pool (csrc/ops/resizable_storage.cpp). What ranks of one
machine send lies in memory that stays until the end of a backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from fastsync.fsdp.shard_layout import ChunkLayout, Shape, lay_out, unsharded_offsets
from fastsync.planner.record import ROOT, Mark, Record, TracedParam
from fastsync.planner.strategy import Carrier, Strategy, codes_of
from fastsync.reducer.bucket_layout import align_up

_DIRECT_BYTES = 128 << 10  # a share of so many is one message (fastsync/fsdp/dtype_shard.py)
_GRAIN = 16 << 10  # bytes, of which packets are multiples
_LAST_UNITS = 3  # of a backward: what the pool keeps is freed there (fastsync/fsdp/context.py)
_MOST_FREE = 2  # times the largest request


@dataclass
class _Blocks:
    """Memory for a part of a step, as csrc/ops/resizable_storage.h gives it on a CPU."""

    keeps: bool
    used: int = 0
    free: list[int] = field(default_factory=list)
    largest: int = 0

    @property
    def held(self) -> int:
        return self.used + sum(self.free)

    def take(self, size: int) -> int:
        self.largest = max(self.largest, size)
        found = next((kept for kept in self.free if size <= kept <= size + size // 4), None)
        if found is not None:
            self.free.remove(found)
        block = size if found is None else found
        self.used += block
        return block

    def give(self, block: int) -> None:
        self.used -= block
        if self.keeps:
            self.free.append(block)
        while sum(self.free) > _MOST_FREE * self.largest:
            self.free.pop(0)

    def trim(self) -> None:
        self.free.clear()


@dataclass
class _Room:
    """Shared memory for packets (csrc/shm/segment.h): a block takes the smallest gap that is
    large enough, and pages stay behind them until they are trimmed."""

    taken: dict[int, int] = field(default_factory=dict)  # bytes by offset
    largest: int = 0
    held: int = 0

    @property
    def _end(self) -> int:
        return max((begin + length for begin, length in self.taken.items()), default=0)

    def take(self, size: int) -> int:
        """Return its offset."""
        before, gaps = 0, [(math.inf, self._end)]
        for begin, length in sorted(self.taken.items()):
            gaps.append((begin - before, before))
            before = begin + length
        _, offset = min(gap for gap in gaps if gap[0] >= size)
        self.taken[offset] = size
        self.largest = max(self.largest, size)
        self.held = max(self.held, offset + size)
        return offset

    def give(self, offset: int) -> None:
        del self.taken[offset]
        excess = self.held - sum(self.taken.values()) - _MOST_FREE * self.largest
        if excess > 0:
            self.held = max(self._end, self.held - excess)

    def trim(self) -> None:
        self.held = self._end


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of one unit on the rank that holds most.

    Attributes:
        shard: of the parameters; `whole`: of all ranks' together, as modules compute with them.
        gathering: blocks that a gather needs besides; `reducing`: a reduction.
        sums: averages of the shares, and `gradients`: what stays of them, in the stored dtype.
        coded: gradients travel as codes.
        packed: parameters whose gradients are copied at once; the others' wait.
        gather_packet, reduce_packet: what is written for ranks of this machine.
    """

    shard: int
    whole: int
    gathering: tuple[int, ...]
    reducing: tuple[int, ...]
    coded: bool
    sums: int
    gradients: int
    packed: frozenset[int]
    gather_packet: int
    reduce_packet: int


def share_of(param: TracedParam, shards: int) -> tuple[int, ...]:
    """Return the sizes of the first rank's share."""
    return Shape(param.shape).local(0, shards)


def unit_sizes(record: Record, strategy: Strategy, carrier: Carrier) -> dict[int, list[UnitSizes]]:
    """By unit: one for each dtype in it, whose parameters travel together."""
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, param in enumerate(record.params):
        alike.setdefault((param.unit, param.dtype), []).append(index)
    found: dict[int, list[UnitSizes]] = {}
    for (unit, _), indices in alike.items():
        found.setdefault(unit, []).append(_sizes(record, indices, strategy, carrier))
    return found


def _sizes(
    record: Record, indices: Sequence[int], strategy: Strategy, carrier: Carrier
) -> UnitSizes:
    params, world = [record.params[index] for index in indices], strategy.shards
    compute = params[0].dtype
    stored = torch.float32 if strategy.masters and compute.itemsize == 2 else compute
    summed = torch.float64 if stored is torch.float64 else torch.float32
    shapes, each = [Shape(param.shape) for param in params], compute.itemsize
    direct = _DIRECT_BYTES // each if carrier.on_cpu else None
    every = range(len(params))
    gathered = lay_out(shapes, every, world, direct, flags=False)
    codes = codes_of(strategy, compute)
    if codes is None:
        reduced = lay_out(shapes, every, world, direct, flags=True)
    else:
        reduced = lay_out(shapes, every, world, None, True, codes.block)
    in_memory = carrier is Carrier.MEMORY
    lowered = (gathered.chunk * each,) if stored is not compute else ()
    staging = () if in_memory else (world * gathered.packed * each,)
    first = int(compute is summed)  # is received where the sums will be
    others = max(0, world - 1 - first) if carrier.on_cpu else 1 - first
    if in_memory:
        others = int(world > 2)
    reducing = (world * reduced.packed * each, others * reduced.chunk * each)
    packet = _own(reduced, shapes, world) * each
    if codes is not None:
        reducing = (codes.nbytes(reduced, world),) * 2
        packet = reducing[0] // world
    sums = reduced.chunk * summed.itemsize
    values = sum(shape.share(world) for shape in shapes)
    return UnitSizes(
        shard=gathered.chunk * stored.itemsize,
        whole=(unsharded_offsets(shapes)[-1] + math.prod(shapes[-1].sizes)) * each,
        gathering=(*lowered, *staging),
        reducing=reducing,
        coded=codes is not None,
        sums=sums,
        gradients=sums if stored is summed else values * stored.itemsize,
        packed=frozenset(i for i, alone in zip(indices, reduced.direct, strict=True) if not alone),
        gather_packet=_own(gathered, shapes, world) * each * in_memory,
        reduce_packet=(world - 1) * packet * in_memory,
    )


def _own(layout: ChunkLayout, shapes: Sequence[Shape], world: int) -> int:
    """Return the number of elements in one rank's messages."""
    return layout.packed + sum(shapes[m].share(world) for m, _, alone in layout.places if alone)


@dataclass
class _Reduction:
    unit: int
    sizes: list[UnitSizes]
    blocks: list[int]
    waiting: float  # bytes of gradients that are sent from where they lie

    def temporary(self, accumulates: bool) -> int:
        """Return the bytes of sums that do not become gradients themselves."""
        return sum(s.sums for s in self.sizes if accumulates or s.gradients != s.sums)


class Units:
    """The units of a rank in the steps of a trace.

    Attributes:
        gradients: bytes of the shares of gradients that are there.
    """

    def __init__(self, record: Record, strategy: Strategy, carrier: Carrier) -> None:
        self._sizes = unit_sizes(record, strategy, carrier)
        self._unit_of = [param.unit for param in record.params]
        self._pool, self._packets = _Blocks(carrier.on_cpu), _Room()
        self._posted = dict[tuple[int, str], int]()  # packets, before this rank reads the others'
        self._read = list[int]()  # and after that
        self._last = {m.place: at for at, m in enumerate(record.marks) if m.kind == "through"}
        self._order = [
            m.place for m in record.marks if m.kind == "enter" and m.place in self._sizes
        ]
        self._in_memory = carrier is Carrier.MEMORY
        self._travels = carrier.on_cpu and not self._in_memory
        self._accumulates = strategy.accumulate > 1
        self.gradients = sum(s.gradients for s in self._every()) if self._accumulates else 0
        self.begin()

    def _every(self) -> list[UnitSizes]:
        return [size for sizes in self._sizes.values() for size in sizes]

    @property
    def shard(self) -> int:
        """Bytes of parameters that a rank keeps."""
        return sum(size.shard for size in self._every())

    @property
    def held(self) -> float:
        """Bytes of whole parameters, of gradients that have not arrived, and of buffers."""
        under_way = sum(r.waiting + r.temporary(self._accumulates) for r in self._reducing)
        return self.left + sum(self._arrived.values()) + under_way

    @property
    def left(self) -> int:
        """Bytes that stay after a backward."""
        return self._pool.held + self._packets.held

    def begin(self) -> None:
        """Begin a forward. The other ranks have read messages during the optimizer's step before
        it."""
        self._read += self._posted.values()
        self._posted.clear()
        self._take_back()
        self._whole: dict[int, list[int]] = {}
        self._gathering: dict[int, list[int]] = {}
        self._reducing: deque[_Reduction] = deque()
        self._arrived: dict[int, float] = {}
        self._done: list[int] = []
        self._ends_soon = False
        self._at = 0
        self._over: set[int] = set()
        if not self._accumulates:
            self.gradients = 0

    def gradient(self, param: int, size: float) -> float:
        """Add a complete gradient, which stays."""
        self._arrived[param] = size
        return 0.0

    def reaches(self, at: int, mark: Mark) -> float:
        """Replay the mark at this place of the trace; return bytes that are held for a moment."""
        unit = mark.place
        if mark.kind not in ("enter", "leave", "return", "through") or unit not in self._sizes:
            return 0.0
        if mark.kind == "enter":
            self._enter(unit)
        elif mark.kind == "leave":
            self._done.append(unit)
            if unit != ROOT:
                self._release(unit)
        elif mark.kind == "return":
            self._return(unit)
        elif at == self._last[unit]:
            return self._end(unit)
        return 0.0

    def end(self) -> None:
        """End the backward."""
        for unit in sorted(self._sizes):
            if unit not in self._over:
                self._end(unit)
        while self._reducing:
            self._finish()
        self._trim()

    def _enter(self, unit: int) -> None:
        self._at += 1
        self._has(unit, self._order[self._at : self._at + 1])

    def _return(self, unit: int) -> None:
        if unit not in self._done:
            return self._has(unit, ())
        at = len(self._done) - 1 - self._done[::-1].index(unit)
        self._done = self._done[:at]
        self._has(unit, self._done[-1:])
        self._ends_soon = at < _LAST_UNITS

    def _has(self, unit: int, following: Iterable[int]) -> None:
        """Gather a unit, then the next ones: at once if messages travel, else once it is there."""
        self._gather(unit)
        if not self._travels:
            self._arrive(unit)
        for each in following:
            self._gather(each)
        self._arrive(unit)

    def _gather(self, unit: int) -> None:
        if unit in self._whole or unit in self._gathering:
            return
        sizes = self._sizes[unit]
        if self._travels:
            self._use(unit)
        blocks = [self._pool.take(block) for size in sizes for block in size.gathering]
        self._post(unit, "gather", sum(size.gather_packet for size in sizes))
        while self._in_memory and blocks:  # what was in them has been written for the others
            self._pool.give(blocks.pop())
        self._gathering[unit] = blocks

    def _use(self, unit: int) -> None:
        self._whole[unit] = [self._pool.take(size.whole) for size in self._sizes[unit]]

    def _arrive(self, unit: int) -> None:
        if unit in self._gathering and unit not in self._whole:
            self._use(unit)
        self._note_read(unit, "gather")
        for block in self._gathering.pop(unit, []):
            self._pool.give(block)

    def _post(self, unit: int, what: str, size: int) -> None:
        """Write a packet. Those of which this rank has read the others' are read before it takes
        more memory: see csrc/shm/messages.cpp."""
        if size:
            self._take_back()
            self._posted[unit, what] = self._packets.take(align_up(size, _GRAIN))

    def _note_read(self, unit: int, what: str) -> None:
        if (unit, what) in self._posted:
            self._read.append(self._posted.pop((unit, what)))

    def _take_back(self) -> None:
        while self._read:
            self._packets.give(self._read.pop())

    def _release(self, unit: int) -> None:
        self._arrive(unit)
        for block in self._whole.pop(unit, []):
            self._pool.give(block)

    def _end(self, unit: int) -> float:
        """End a unit's backward; return the bytes that only sending needs."""
        self._over.add(unit)
        self._release(unit)
        while self._reducing:
            self._finish()
        if self._ends_soon:
            self._trim()
        sizes = self._sizes[unit]
        packed = {index for size in sizes for index in size.packed}
        own = [index for index in self._arrived if self._unit_of[index] == unit]
        blocks = [[self._pool.take(block) for block in size.reducing] for size in sizes]
        self._post(unit, "reduce", sum(size.reduce_packet for size in sizes))
        waiting = sum(self._arrived[index] for index in own if index not in packed)
        for index in own:
            del self._arrived[index]
        sending = 0.0
        if self._in_memory:
            sent = [b.pop(0) for size, b in zip(sizes, blocks, strict=True) if not size.coded]
            sending, waiting = waiting + sum(sent), 0.0
            for block in sent:
                self._pool.give(block)
        every = [block for each in blocks for block in each]
        self._reducing.append(_Reduction(unit, sizes, every, waiting))
        self._keep(sizes, are_sums=True)
        return sending

    def _keep(self, sizes: Sequence[UnitSizes], are_sums: bool) -> None:
        """Count new gradients: those that are the sums themselves when these are made, others
        later."""
        made = (s.gradients for s in sizes if (s.gradients == s.sums) == are_sums)
        self.gradients += 0 if self._accumulates else sum(made)

    def _finish(self) -> None:
        reduction = self._reducing.popleft()
        self._note_read(reduction.unit, "reduce")
        for block in reduction.blocks:
            self._pool.give(block)
        self._keep(reduction.sizes, are_sums=False)

    def _trim(self) -> None:
        self._pool.trim()
        self._packets.trim()
