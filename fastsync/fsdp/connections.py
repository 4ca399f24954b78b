"""How the units of one model are reached on other ranks, and what they are called there.

[Note: memory ahead of time]
Whole parameters, and the buffers that shares and gradients travel in, lie in a pool. Its mark is a
setting of the environment. A unit that a module needs is gathered whatever the mark says; a unit
that is not needed yet is gathered only where it fits in besides.

A gather is a collective: either every rank begins it ahead of time, or none does. So ranks compare
their marks, and what fits follows from whole sizes of units, never from what a rank's allocator
says.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import outside_transforms, without_modes
from fastsync.faults.consensus import Statement
from fastsync.fsdp.dtype_shard import DtypeShard
from fastsync.fsdp.group_links import Links
from fastsync.fsdp.mesh import Place
from fastsync.fsdp.param_group import Unit
from fastsync.reducer import core
from fastsync.reducer.process_groups import OwnGroups, new_part
from fastsync.timeline.moves import UnitInfo

_MARK = "FASTSYNC_UNIT_MEMORY_MB"
NO_MARK = sys.maxsize  # bytes
_MIB = 2**20


class Connections:
    """Links to other ranks that a model's units share.

    Attributes:
        in_memory: whether ranks of one machine may exchange through memory that they share.
        mark: bytes that units may take before others stop being gathered ahead.
        infos: how timelines call the units, once that is known; the list stays the same one.
    """

    def __init__(self) -> None:
        self.in_memory = True
        self.mark = NO_MARK
        self.infos: list[UnitInfo] = []
        self._links: dict[dist.ProcessGroup, Links] = {}
        self._named: list[DtypeShard] = []
        self._post_forward_groups: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}
        self._own = OwnGroups()
        self._own.end_with(self)

    @cached_property
    def log(self) -> core.UnitLog:
        """Return the log of what the units do, step by step."""
        return core.UnitLog()

    def merge(self, other: Connections) -> None:
        """Take the links of a unit that was alone, and belongs to these from now on."""
        self.mark = min(self.mark, other.mark)
        if other.in_memory == self.in_memory:
            self._links = {**other._links, **self._links}
        self._post_forward_groups = {**other._post_forward_groups, **self._post_forward_groups}
        self._own.merge(other._own)

    def connect(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Prepare a unit to be gathered, and resharded to fewer ranks. Collective the first time.

        Args:
            units: of the model, which the ranks compare.
        """
        unit.connect(self._links_of(unit.place, units))
        number = unit.switches.reshard_to
        if number is None or unit.post_forward_group is not None:
            return
        group = unit.place.group
        if (group, number) not in self._post_forward_groups:
            part = new_part(group, number, "between forward and backward", self._own)
            self._post_forward_groups[group, number] = part
        unit.post_forward_group = self._post_forward_groups[group, number]

    def _links_of(self, place: Place, units: Sequence[Unit]) -> Links:
        if place.group not in self._links:
            self.mark = _mark_here()
            statement = _statement(units, place, self.mark)
            # A script's own mode that counts collectives is about those of its model.
            with without_modes(), outside_transforms():
                self._links[place.group] = Links.of(place, self.in_memory, self.mark, statement)
        return self._links[place.group]

    def introduce(self, units: Sequence[Unit]) -> None:
        """Set the names of connected units, in the same order on every rank."""
        dtype_shards = [dtype_shard for unit in units for dtype_shard in unit.dtype_shards]
        if dtype_shards == self._named:
            return
        self._named = dtype_shards
        self.infos[:] = [info for unit in units for info in _infos(unit)]
        for number, (dtype_shard, info) in enumerate(zip(dtype_shards, self.infos, strict=True)):
            dtype_shard.call(core.UnitName(number, info.words, info.parameters))
        names = [f"unit {info.name!r}" for info in self.infos]
        for links in links_in(units):
            for peers in links.peers():
                peers.join(self.log, names)


def _statement(units: Sequence[Unit], place: Place, mark: int) -> Statement:
    """Return what the ranks of a place must agree on before they gather anything."""
    own = [(n, unit) for n, unit in enumerate(units) if unit.place.group is place.group]
    about = {
        what.format(f"{number} ({unit.name or 'root'})"): statement
        for number, unit in own
        for what, statement in unit.settings().items()
    }
    about[_MARK] = "none" if mark == NO_MARK else f"{mark} bytes"
    return Statement(about, [param.described() for _, unit in own for param in unit.params])


def links_in(units: Sequence[Unit]) -> list[Links]:
    """Return the links of units, also those from a gather before the first forward of the root."""
    dtype_shards = (dtype_shard for unit in units for dtype_shard in unit.dtype_shards)
    return list({id(s.links): s.links for s in dtype_shards if s.links is not None}.values())


def travels(unit: Unit) -> bool:
    """Return whether a unit is gathered while this thread goes on."""
    return all(
        dtype_shard.links is not None and dtype_shard.links.travels
        for dtype_shard in unit.dtype_shards
    )


def _infos(unit: Unit) -> list[UnitInfo]:
    """Return how timelines and errors call it: a name for each dtype shard."""
    name = unit.name or "root"
    several = len(unit.dtype_shards) > 1
    return [_info(s, f"{name} ({s.compute})" if several else name) for s in unit.dtype_shards]


def _info(dtype_shard: DtypeShard, name: str) -> UnitInfo:
    """Return the description of a dtype shard for timelines."""
    numel = sum(math.prod(param.shape.sizes) for param in dtype_shard.params)
    dtype = str(dtype_shard.compute).removeprefix("torch.")
    names = tuple(param.name for param in dtype_shard.params)
    return UnitInfo(name, names, numel * dtype_shard.compute.itemsize, dtype)


def _mark_here() -> int:
    """The mark of this process, in bytes."""
    wanted = Env.read().unit_memory_mb
    return NO_MARK if wanted is None else max(1, int(wanted * _MIB))


def fits(mark: int, units: Iterable[Unit], reducing: Iterable[Unit]) -> bool:
    """Return whether `units` may be whole at once, while the gradients of one
    of `reducing` travel.
    """
    travelling = max((unit.bytes_to_reduce() for unit in reducing), default=0)
    return sum(unit.bytes_to_gather() for unit in units) + travelling <= mark
