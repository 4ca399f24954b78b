"""Where gradients lie in a flat buffer: offsets, padding, flags. Pure integers, checked invariants.

A flat buffer of a bucket is, in elements of its wire dtype::

    | slot 0 | pad | slot 1 | pad | ... | flags (one per slot) | vote | pad |

Each slot starts at a multiple of `ALIGNMENT`, so that kernels can use 16-byte accesses whatever the
dtype; the whole is a multiple of lcm(world size, `ALIGNMENT`), so that any bucket can be split into
equal shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "FlatLayout", "align_up", "dense_layout", "flat_layout"]

# Elements. 16 bytes hold 16 elements of the narrowest wire format, one byte each.
ALIGNMENT = 16


@dataclass(frozen=True)
class FlatLayout:
    """Offsets into one flat buffer, in elements.

    Attributes:
        offsets: first element of each slot.
        numels: elements of each slot, without padding.
        flags_offset: first flag, or -1 where there are no flags.
        numel: elements of the whole buffer.
        alignment: what every offset is a multiple of, in elements.
    """

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    flags_offset: int
    numel: int
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        end = 0
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            if offset < end or offset % self.alignment or numel < 0:
                raise ValueError(f"slot at {offset} overlaps its predecessor or is misaligned")
            end = offset + numel
        if self.flags_offset >= 0:
            if self.flags_offset < end:
                raise ValueError(f"flags at {self.flags_offset} overlap slots that end at {end}")
            end = self.flags_offset + len(self.offsets) + 1
        if self.numel < end:
            raise ValueError(f"{self.numel} elements cannot hold slots and flags up to {end}")


def align_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to


def dense_layout(numels: Sequence[int]) -> FlatLayout:
    """Slots without padding, flags or shards, as communication hooks expect a buffer."""
    offsets = tuple(itertools.accumulate(numels, initial=0))
    return FlatLayout(offsets[:-1], tuple(numels), -1, max(offsets[-1], 1), alignment=1)


def flat_layout(numels: Sequence[int], world_size: int, flags: bool) -> FlatLayout:
    """Lays out slots of `numels` elements one after the other.

    Args:
        numels: elements of each slot; 0 is allowed.
        world_size: ranks that must be able to take equal shards.
        flags: reserve one flag per slot and one vote behind the slots.
    """
    offsets = []
    end = 0
    for numel in numels:
        offsets.append(end)
        end = align_up(end + numel, ALIGNMENT)
    flags_offset = end if flags else -1
    if flags:
        end += len(numels) + 1
    total = align_up(max(end, 1), math.lcm(world_size, ALIGNMENT))
    return FlatLayout(tuple(offsets), tuple(numels), flags_offset, total)
