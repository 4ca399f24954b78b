"""Ownership of the elements of a set of parameters by ranks. Pure integers, checked invariants.

Parameters lie one after the other in a flat buffer of as many equal regions as there are ranks;
rank r owns region r::

    | region 0               | region 1               | ...
    | p0 | pad | p1 | pad | p2 (its first part) : p2 (its rest) | pad | p3 | ...

Cut by elements, regions are equal and a parameter may lie in several; cut by tensors, each lies in
one, and the largest region decides how long all are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastsync.reducer.bucket_layout import ALIGNMENT, align_up


@dataclass(frozen=True)
class Partition:
    """Ranks that share parameters, and the shares that one rank steps on.

    Attributes:
        ranks: owner of each share, in their order, as the ranks were counted at the start.
        mine: the number of this rank's own.
        doubled: each rank steps on the share before its own, too, so that one death loses nothing.
    """

    ranks: tuple[int, ...]
    mine: int
    doubled: bool = False

    @property
    def size(self) -> int:
        """Return how many shares there are."""
        return len(self.ranks)

    @property
    def before(self) -> int:
        """Return the share whose second holder this rank is, if they are doubled."""
        return (self.mine - 1) % self.size

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the shares that this rank steps on."""
        return (self.mine, self.before) if self.doubled and self.size > 1 else (self.mine,)

    def offered(self, present: Collection[int]) -> tuple[int, ...]:
        """Return the shares that this rank describes to the others: one of the ranks `present` does
        for each.
        """
        return tuple(s for s in self.kept if s == self.mine or self.ranks[s] not in present)

    def lost(self, present: Collection[int]) -> list[tuple[int, int]]:
        """Return owner and holder of the shares that none of the ranks `present` has."""
        pairs = zip(self.ranks, self.ranks[1:] + self.ranks[:1], strict=True)
        return [pair for pair in pairs if not any(rank in present for rank in pair)]


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of one parameter, in the order of its memory, that one rank owns."""

    param: int
    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    """Positions of parameters in a flat buffer, in elements.

    Attributes:
        offsets: first element of each parameter.
        region: elements of each rank's region.
        pieces: by parameter, then by rank; one, without elements, of a parameter that has none.
    """

    offsets: tuple[int, ...]
    region: int
    pieces: tuple[Slice, ...]

    def owned(self, rank: int) -> list[Slice]:
        """Return the pieces of one rank."""
        return [piece for piece in self.pieces if piece.rank == rank]


def element_regions(
    numels: Sequence[int], world: int, alignment: int = ALIGNMENT
) -> tuple[list[int], int]:
    """Return where parameters lie that are cut by elements, and how long a rank's region is."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end = align_up(end + numel, alignment)
    return offsets, align_up(math.ceil(end / world), alignment)


def cut_by_elements(numels: Sequence[int], world: int, alignment: int = ALIGNMENT) -> ShardLayout:
    """Return equal shares: no rank owns more than the N-th part, rounded up to `alignment`.

    Parameters and regions begin at multiples of it, and so does each piece within its parameter.
    """
    offsets, region = element_regions(numels, world, alignment)
    pieces = []
    for param, (offset, numel) in enumerate(zip(offsets, numels, strict=True)):
        for rank in range(offset // max(region, 1), world):
            begin = max(0, rank * region - offset)
            cut = min(numel, (rank + 1) * region - offset)
            if begin < cut:
                pieces.append(Slice(param, rank, begin, cut))
        if numel == 0:
            pieces.append(Slice(param, 0, 0, 0))
    return ShardLayout(tuple(offsets), region, tuple(pieces))


def cut_by_tensors(numels: Sequence[int], world: int, alignment: int = ALIGNMENT) -> ShardLayout:
    """Assign whole parameters, the largest first, each to the rank that owns least so far.

    Parameters and regions begin at multiples of `alignment`.
    """
    owned = [0] * world
    place: dict[int, tuple[int, int]] = {}
    for param in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        rank = min(range(world), key=lambda r: (owned[r], r))
        place[param] = (rank, owned[rank])
        owned[rank] += align_up(numels[param], alignment)
    region = max(owned, default=0)
    offsets = tuple(place[i][0] * region + place[i][1] for i in range(len(numels)))
    pieces = (Slice(i, place[i][0], 0, numel) for i, numel in enumerate(numels))
    return ShardLayout(offsets, region, tuple(pieces))
