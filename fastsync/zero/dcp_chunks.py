"""A tensor of which this rank has consecutive elements, in the eyes of distributed checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastsync._torch import WrapperTensor
from fastsync.zero.rectangles import rectangles

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Chunks"]

aten = torch.ops.aten


class Chunks(WrapperTensor):
    """Tensor with the shape of a whole parameter, but the memory of a part of it.

    torch.distributed.checkpoint writes and reads it as rectangles, through the protocol that
    DTensor answers too. Rectangles that all ranks write make up the whole tensor in the files.

    Args:
        like: the parameter: its shape, and the order in which its elements lie in memory.
        part: consecutive elements in that order, one-dimensional.
        begin: the first of them.
    """

    part: torch.Tensor
    begin: int
    views: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, part: torch.Tensor, begin: int) -> Chunks:
        chunks = cls.without_memory(like, part)
        chunks.part, chunks.begin = part, begin
        chunks.views = dict(_views(like, part, begin))
        return chunks

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Chunks:
        changed = _CHANGES.get(func)
        if changed is None:
            raise RuntimeError(
                f"expects torch.distributed.checkpoint to save or load the state of an optimizer, "
                f"but got {func} on a tensor of which each rank has a part; the whole is in "
                "optimizer.state_dict()"
            )
        first = args[0]
        return cls(first, changed(first.part), first.begin)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the write items of this rank."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import (
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

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


# Staging for an asynchronous save makes an empty one on the CPU, and fills its attributes.
_CHANGES: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    aten.clone.default: torch.clone,
    aten.detach.default: torch.detach,
    aten.new_empty.default: lambda part: torch.empty_like(part, device="cpu"),
}


def _views(
    like: torch.Tensor, part: torch.Tensor, begin: int
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the rectangles of consecutive elements, by their offsets."""
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: -strides[dim])
    place = [order.index(dim) for dim in range(like.dim())]
    start = 0
    shape = [like.shape[dim] for dim in order]
    for offsets, sizes in rectangles(shape, begin, begin + part.numel()):
        numel = math.prod(sizes)
        view = part[start : start + numel].view(sizes).permute(place)
        yield tuple(offsets[i] for i in place), view
        start += numel
