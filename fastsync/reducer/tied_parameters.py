"""Parameters that are tied by their memory instead of being one parameter.

Under DistributedDataParallel they stay tied, as nothing moves them. Where ranks share parameters,
or step on slices of them, each parameter has memory of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class _Memory:
    """Location of a tensor in memory. Keeps no memory alive.

    Attributes:
        begin: address of its first byte.
        end: address behind the last byte of its elements.
    """

    name: str
    storage: StorageWeakRef
    begin: int
    end: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Memory | None:
        """Return the memory of a tensor; None: it has none, or none that can be compared."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
            return None
        try:
            storage, begin = tensor.untyped_storage(), tensor.data_ptr()
            if storage.data_ptr() == 0:
                return None
        except RuntimeError:  # as of tensors that are traced, or made of others
            return None
        sizes, strides, itemsize = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        end = begin + (last + 1) * itemsize
        return cls(name, StorageWeakRef(storage), begin, end, sizes, strides, itemsize)

    def overlaps(self, other: _Memory) -> bool:
        """Return whether both have the same element, or a part of it."""
        if self.begin >= other.end or other.begin >= self.end:
            return False
        origin = min(self.begin, other.begin)
        touched = torch.zeros(max(self.end, other.end) - origin, dtype=torch.bool, device="cpu")
        self._bytes(touched, origin).fill_(True)
        return bool(other._bytes(touched, origin).any())

    def _bytes(self, touched: torch.Tensor, origin: int) -> torch.Tensor:
        strides = [stride * self.itemsize for stride in self.strides]
        sizes = (*self.sizes, self.itemsize)
        return touched.as_strided(sizes, (*strides, 1), self.begin - origin)


@dataclass
class _Stretch:
    """Tensors of one storage that lie from `begin` to `end`, where no others do."""

    begin: int
    end: int
    tensors: list[_Memory]


class Memories:
    """Parameters so far, of one model or of several."""

    def __init__(self) -> None:
        # By their storage, whose address is no other's while a weak reference is held; in order.
        self._known: defaultdict[int, list[_Stretch]] = defaultdict(list)
        self._most = 1000  # storages, until those that are gone are forgotten

    def add(self, name: str, tensor: torch.Tensor) -> str | None:
        """Add a tensor, and return the name of one that shares elements with it.

        Those whose storage is gone do not count.
        """
        memory = _Memory.of(name, tensor)
        if memory is None:
            return None
        if len(self._known) >= self._most:
            self._forget()
        stretches = self._known[memory.storage.cdata]
        first = bisect_right(stretches, memory.begin, key=lambda each: each.end)
        last = bisect_left(stretches, memory.end, first, key=lambda each: each.begin)
        met = stretches[first:last]
        beside = [other for each in met for other in each.tensors]
        found = next((other.name for other in beside if memory.overlaps(other)), None)
        begin = min([memory.begin, *(each.begin for each in met)])
        end = max([memory.end, *(each.end for each in met)])
        stretches[first:last] = [_Stretch(begin, end, [*beside, memory])]
        return found

    def _forget(self) -> None:
        for address, stretches in list(self._known.items()):
            if stretches[0].tensors[0].storage.expired():
                del self._known[address]
        self._most = 2 * len(self._known) + 1000


def check_untied(
    named: Iterable[tuple[str, torch.Tensor]], remedy: str, memories: Memories | None = None
) -> None:
    """Check that no two of these tensors share memory.

    Args:
        remedy: what a script may do instead.
        memories: of tensors that came before.

    Raises:
        ValueError: two do.
    """
    memories = Memories() if memories is None else memories
    for name, tensor in named:
        other = memories.add(name, tensor)
        if other is not None:
            raise ValueError(
                f"{other!r} and {name!r} share memory, but are not the same parameter, so each "
                "would get memory of its own and they would differ after the first step. Have "
                f"both modules hold one parameter, as in head.weight = embedding.weight, {remedy}"
            )
