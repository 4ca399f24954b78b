"""A tensor of which this rank has consecutive elements, in the eyes of distributed checkpoints."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from fastsync._torch import LocalPlace, WrapperTensor, local_place

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# Offsets and sizes: checkpoint formats name parts of arrays so.
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


class Chunks(WrapperTensor):
    """Tensor with the shape of a whole parameter, but the memory of a part of it.

    torch.distributed.checkpoint writes and reads it as rectangles, through the protocol that
    DTensor answers too. Rectangles that all ranks write make up the whole tensor in the files.

    Of a DTensor it is a part of this rank's local tensor.

    Args:
        like: the parameter: its shape, and the order in which its elements lie in memory.
        part: consecutive elements in that order, one-dimensional unless they are all.
        begin: the first of them.
        place: where the local tensor lies in the whole; by default, it is the whole.
    """

    _handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}
    part: torch.Tensor
    begin: int
    place: LocalPlace
    views: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, part: torch.Tensor, begin: int, place: LocalPlace | None = None
    ) -> Chunks:
        chunks = cls.without_memory(like, part)
        chunks.part, chunks.begin = part, begin
        chunks.place = place = local_place(like) if place is None else place
        chunks.views = {
            tuple(map(operator.add, place.offsets, offsets)): view
            for offsets, view in _views(place, part, begin)
            if view.numel() or not chunks.numel()
        }
        return chunks

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Refuse what only the whole tensor could do."""
        raise RuntimeError(
            f"expects torch.distributed.checkpoint to save or load the state of an optimizer, "
            f"but got {func} on a tensor of which each rank has a part; the whole is in "
            "optimizer.state_dict()"
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the write items of this rank; none where others write the same."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if not self.place.writes:
            return []
        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the positions of its rectangles."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), view.shape)
            for offsets, view in self.views.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one rectangle, which may be written to."""
        return self.views[tuple(index.offset or ())]

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        end = self.begin + self.part.numel()
        return f"Chunks(shape={tuple(self.shape)}, elements {self.begin} to {end}: {self.part})"


@Chunks.handles("clone.default", "detach.default")
def _apply(func: Any, chunks: Chunks, **named: Any) -> Chunks:
    return Chunks(chunks, func(chunks.part), chunks.begin, chunks.place)


@Chunks.handles("new_empty.default")
def _new_empty(func: Any, chunks: Chunks, *_: Any, **named: Any) -> Chunks:
    """Staging for an asynchronous save makes one on the CPU, and fills its attributes."""
    part = torch.empty_like(chunks.part, device="cpu")
    return Chunks(chunks, part, chunks.begin, chunks.place)


def _views(
    like: LocalPlace, part: torch.Tensor, begin: int
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the rectangles of consecutive elements, by their offsets."""
    if part.shape == like.shape:
        yield (0,) * part.dim(), part
        return
    strides, dims = like.stride, range(len(like.shape))
    order = sorted(dims, key=lambda dim: -strides[dim])
    place = [order.index(dim) for dim in dims]
    start = 0
    shape = [like.shape[dim] for dim in order]
    for offsets, sizes in rectangles(shape, begin, begin + part.numel()):
        numel = math.prod(sizes)
        view = part[start : start + numel].view(sizes).permute(place)
        yield tuple(offsets[i] for i in place), view
        start += numel


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[Rectangle]:
    """Elements [begin, end) of a contiguous array, cut into as few as its first dimensions allow.

    At most 2n - 1 for n dimensions: the rest of a row, whole rows, the beginning of a row, and
    the same within the two rows that are not whole.

    Yields:
        offsets and sizes, in the order of the elements; none of them is empty.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from _within(shape, last, begin, end)
        return
    yield from _within(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within(shape, last, last * row, end)


def _within(shape: Sequence[int], index: int, begin: int, end: int) -> Iterator[Rectangle]:
    """Yield the rectangles of one row, `index` in the first dimension."""
    start = index * math.prod(shape[1:])
    for offsets, sizes in rectangles(shape[1:], begin - start, end - start):
        yield (index, *offsets), (1, *sizes)
