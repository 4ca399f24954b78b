"""Layout of the shares of a unit's parameters. Pure integers.

A rank's chunk holds its share of every param, each at a multiple of `ALIGNMENT`. Shares are of
equal size on all ranks; where a dimension is not divisible, the last ranks' end earlier::

    | small params | flags | large params, each a message by itself |

What is small is packed and travels in one message. Flags, one per param, are there for gradients
alone (see csrc/fsdp/param_group.h). Where a chunk travels as codes, everything counts as small, and
each share begins with a block of the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.reducer.bucket_layout import ALIGNMENT, align_up


@dataclass(frozen=True)
class Shape:
    """A parameter's sizes, and the dimension along which ranks share it."""

    sizes: tuple[int, ...]
    dim: int = 0

    def count(self, rank: int, world: int) -> int:
        """Return how much of that dimension a rank has, as torch.chunk() cuts it."""
        length = self.sizes[self.dim]
        each = math.ceil(length / world)
        return min(each, max(0, length - rank * each))

    def local(self, rank: int, world: int) -> tuple[int, ...]:
        """Sizes of a rank's share."""
        count = self.count(rank, world)
        return (*self.sizes[: self.dim], count, *self.sizes[self.dim + 1 :])

    def share(self, world: int) -> int:
        """Elements of the largest share."""
        return math.prod(self.local(0, world))

    @property
    def contiguous(self) -> bool:
        """Return whether each share is one run of the parameter's elements."""
        return math.prod(self.sizes[: self.dim]) == 1


@dataclass(frozen=True)
class ChunkLayout:
    """A rank's chunk, in elements.

    Attributes:
        params: which have a place, by index.
        offsets: first element of each one's share.
        direct: which travel by themselves.
        chunk: elements of a chunk.
        packed: of these, in the first message.
        flags: where flags begin; -1: there are none.
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    direct: tuple[bool, ...]
    chunk: int
    packed: int
    flags: int

    @property
    def values(self) -> int:
        """Elements before the flags."""
        return self.packed if self.flags < 0 else self.flags

    @property
    def places(self) -> list[tuple[int, int, bool]]:
        """Param, offset and whether it travels by itself."""
        return list(zip(self.params, self.offsets, self.direct, strict=True))


def lay_out(
    shapes: Sequence[Shape],
    params: Sequence[int],
    world: int,
    direct_from: int | None,
    flags: bool,
    block: int | None = None,
) -> ChunkLayout:
    """The chunk of those `params`.

    Args:
        shapes: of all of the unit's.
        direct_from: elements from which a share travels by itself; None: all are packed.
        block: block of the format whose codes travel; None: elements travel.
    """
    alignment = math.lcm(block or 1, ALIGNMENT)
    shares = [shapes[m].share(world) for m in params]
    direct = tuple(
        direct_from is not None and share >= direct_from and shapes[m].contiguous
        for m, share in zip(params, shares, strict=True)
    )
    offsets = [0] * len(params)
    end = 0
    for i, share in enumerate(shares):
        if not direct[i]:
            offsets[i] = end
            end = align_up(end + share, alignment)
    if block is not None:
        end = max(end, alignment)  # no code is that of nothing
    flags_at = end if flags else -1
    end = packed = align_up(end + (len(params) if flags else 0), ALIGNMENT)
    for i, share in enumerate(shares):
        if direct[i]:
            offsets[i] = end
            end = align_up(end + share, ALIGNMENT)
    return ChunkLayout(tuple(params), tuple(offsets), direct, end, packed, flags_at)


def unsharded_offsets(shapes: Sequence[Shape]) -> list[int]:
    """First element of each whole parameter where all lie side by side."""
    offsets, end = [], 0
    for shape in shapes:
        offsets.append(end)
        end = align_up(end + math.prod(shape.sizes), ALIGNMENT)
    return offsets
