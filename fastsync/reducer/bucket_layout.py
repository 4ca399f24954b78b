"""Layout of gradients in a flat buffer: offsets, padding, flags. Pure integers, checked invariants.

A flat buffer of a bucket is, in elements of its wire dtype::

    | slot 0 | pad | slot 1 | pad | ... | flags (one per slot) | vote | pad |

Each slot starts at a multiple of `ALIGNMENT`, so that kernels can use 16-byte accesses whatever the
dtype; the whole is a multiple of lcm(world size, `ALIGNMENT`), so that any bucket can be split into
equal shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """Return the smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to


def dense_layout(numels: Sequence[int]) -> FlatLayout:
    """Slots without padding, flags or shards, as communication hooks expect a buffer."""
    offsets = tuple(itertools.accumulate(numels, initial=0))
    return FlatLayout(offsets[:-1], tuple(numels), -1, max(offsets[-1], 1), alignment=1)


def flat_layout(numels: Sequence[int], world_size: int, flags: bool) -> FlatLayout:
    """Lay out slots of `numels` elements one after the other.

    Args:
        numels: elements of each slot; 0 is allowed.
        world_size: ranks that must be able to take equal shards.
        flags: reserve one flag per slot and one vote after the slots.
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


def slot_layout(numels: Sequence[int], block: int) -> FlatLayout:
    """Slots at multiples of `block`, so that no block holds elements of two slots; no flags."""
    alignment = math.lcm(block, ALIGNMENT)
    sizes = (align_up(numel, alignment) for numel in numels)
    offsets = tuple(itertools.accumulate(sizes, initial=0))
    return FlatLayout(
        offsets[:-1], tuple(numels), -1, max(offsets[-1], alignment), alignment=alignment
    )


@dataclass(frozen=True)
class PayloadLayout:
    """The bytes of a coded bucket: chunks, each coded elements followed by flags.

    Attributes:
        pieces: parts of the bucket that travel one after the other.
        chunk_numel: elements of a chunk, a multiple of the block.
        coded_bytes: bytes of a chunk's codes.
        flags_offset: byte of a chunk's first flag.
        flags_per_chunk: flags in a chunk, 4 bytes each.
        chunk_bytes: bytes of a chunk, a multiple of `ALIGNMENT`.
        chunks: in the whole bucket.
    """

    pieces: int
    chunk_numel: int
    coded_bytes: int
    flags_offset: int
    flags_per_chunk: int
    chunk_bytes: int
    chunks: int

    def bytes_for(self, numel: int) -> int:
        """Return the bytes of a bucket of `numel` elements, padding of slots included."""
        return self.chunk_bytes * -(-numel // self.chunk_numel)


def payload_layout(
    slots: FlatLayout,
    parts: int,
    coded_bytes: Callable[[int], int],
    flags: int,
    piece_bytes: int,
) -> PayloadLayout:
    """Cut a bucket into pieces, and each into `parts` equal chunks.

    Args:
        slots: where gradients lie; chunks are multiples of its alignment.
        parts: ranks that each take a chunk of every piece, or 1 where all take all.
        coded_bytes: bytes of a chunk of so many elements.
        flags: how many travel with the bucket.
        piece_bytes: the size of a piece to aim at.
    """
    pieces = max(1, round(coded_bytes(slots.numel) / piece_bytes))
    chunk = align_up(-(-slots.numel // (pieces * parts)), slots.alignment)
    pieces = -(-slots.numel // (chunk * parts))
    per_chunk = align_up(-(-flags // (pieces * parts)), ALIGNMENT)
    coded = coded_bytes(chunk)
    offset = align_up(coded, ALIGNMENT)
    size = offset + 4 * per_chunk
    return PayloadLayout(pieces, chunk, coded, offset, per_chunk, size, pieces * parts)


@dataclass(frozen=True)
class RegionPart:
    """Consecutive elements of a slot, in the order of its memory, that one rank owns.

    Attributes:
        begin: first of them in the slot.
        place: first of them in the chunk that travels to the rank.
    """

    slot: int
    rank: int
    begin: int
    numel: int
    place: int


@dataclass(frozen=True)
class RegionLayout:
    """Layout of gradients on their way to the ranks that own them: a chunk of equal size for each
    rank.

    Attributes:
        numel: elements of a chunk.
        flags: floats that travel with each: two per slot and the vote.
        ranks: how many there are.
        chunks: how many a rank hands to collectives.
    """

    parts: tuple[RegionPart, ...]
    numel: int
    flags: int
    ranks: int
    chunks: int


def region_layout(slots: FlatLayout, ranks: int, block: int) -> RegionLayout:
    """Pack what each rank owns of each slot into that rank's chunk.

    Args:
        slots: where gradients lie among as many equal regions as there are ranks.
        block: elements; every part begins at a multiple.
    """
    alignment, region = math.lcm(block, ALIGNMENT), slots.numel // ranks
    parts = []
    ends = [0] * ranks
    for slot, (offset, numel) in enumerate(zip(slots.offsets, slots.numels, strict=True)):
        for rank in range(offset // max(1, region), ranks):
            begin = max(0, rank * region - offset)
            size = min(numel, (rank + 1) * region - offset) - begin
            if size <= 0:
                break
            parts.append(RegionPart(slot, rank, begin, size, ends[rank]))
            ends[rank] = align_up(ends[rank] + size, alignment)
    flags = 2 * len(slots.offsets) + 1
    return RegionLayout(tuple(parts), max(alignment, *ends), flags, ranks, ranks)


def outline_regions(slots: FlatLayout, ranks: int, block: int) -> RegionLayout:
    """Return the same without its parts: those of thousands of ranks would not fit into memory."""
    alignment, region = math.lcm(block, ALIGNMENT), max(1, slots.numel // ranks)
    longest, rank, end = alignment, 0, 0  # of the rank whose parts come now
    for offset, numel in zip(slots.offsets, slots.numels, strict=True):
        first, last = offset // region, (offset + max(1, numel) - 1) // region
        if first != rank:
            rank, end = first, 0
        if last > first:
            longest = max(longest, align_up(end + (first + 1) * region - offset, alignment))
            if last > first + 1:  # whole regions
                longest = max(longest, align_up(region, alignment))
            rank, end = last, 0
        end = align_up(end + min(numel, offset + numel - last * region), alignment)
        longest = max(longest, end)
    return RegionLayout((), longest, 2 * len(slots.offsets) + 1, ranks, ranks)


def region_payload(regions: RegionLayout, coded_bytes: Callable[[int], int]) -> PayloadLayout:
    """Return the bytes of those chunks where they travel as codes; each carries all flags."""
    coded, flags = coded_bytes(regions.numel), align_up(regions.flags, ALIGNMENT)
    offset = align_up(coded, ALIGNMENT)
    size = offset + 4 * flags
    return PayloadLayout(1, regions.numel, coded, offset, flags, size, regions.chunks)
