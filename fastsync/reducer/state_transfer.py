"""Gives everything that one rank has to another: any object, its tensors in long messages.

The object is pickled without its tensors. Large ones travel from and to memory of their own, small
ones together. A thread does it, so that both ranks see meanwhile whether others end.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastsync.reducer.monitor import watched_call

_LARGE = 1 << 20  # bytes from which on a tensor travels alone
_MESSAGE = 256 << 20  # bytes of a message at most
_PLACE = "the handing over of the state to ranks that come back"
_TAG = 7001
_MADV_POPULATE_WRITE = 23  # of Linux from 5.14 on


@dataclass(frozen=True)
class _Spec:
    """A tensor that is not there yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")


def give(make: Callable[[], Any], group: dist.ProcessGroup, to: int) -> None:
    """Send what `make` returns, or why it cannot, to rank `to` of `group`, which receives.

    Raises:
        SyncFault: a rank has ended.
    """
    try:
        tensors: list[torch.Tensor] = []
        content, failure = _pickled(make(), tensors), ""
        tensors = [t.cpu() for t in tensors]  # on this thread's streams, which have made them
    except Exception as error:  # a `state_dict()` of any class
        tensors, content, failure = [], b"", f"{type(error).__name__}: {error}"
    specs = [_Spec(tuple(t.shape), t.dtype) for t in tensors]
    head = pickle.dumps((specs, content, failure))
    watched_call(group, _PLACE, partial(_send_all, head, tensors, group, to))


def receive(group: dist.ProcessGroup, sender: int) -> Any:
    """Receive the tensors that rank `sender` of `group` sends.

    Raises:
        SyncFault: a rank has ended.
        ValueError: the sender cannot send them; the text says why.
    """
    return watched_call(group, _PLACE, partial(_receive_all, group, sender))


class _Pickler(pickle.Pickler):
    """Pickler that leaves tensors out, and lists them."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.append(obj.detach())
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _pickled(held: Any, tensors: list[torch.Tensor]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tensors).dump(held)
    return file.getvalue()


def _send_all(
    head: bytes, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, to: int
) -> None:
    send = partial(_travel, group.send, to)
    text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    send(torch.tensor([text.numel()], dtype=torch.int64, device="cpu").view(torch.uint8))
    send(text)
    whole = [_bytes_of(t.resolve_conj().resolve_neg().contiguous()) for t in tensors]
    large, small = _sorted_by_size(whole)
    send(*large, *([torch.cat(small)] if small else []))


def _receive_all(group: dist.ProcessGroup, sender: int) -> Any:
    fill = partial(_travel, group.recv, sender)
    size = torch.empty(1, dtype=torch.int64, device="cpu")
    fill(size.view(torch.uint8))
    text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    fill(text)
    specs, content, failure = pickle.loads(text.numpy().tobytes())
    if failure:
        raise ValueError(f"fastsync: a rank that trains cannot give its state: {failure}")
    tensors = [spec.make() for spec in specs]
    large, small = _sorted_by_size([_bytes_of(t) for t in tensors])
    sizes = [flat.numel() for flat in small]
    together = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    fill(*large, *([together] if small else []), meanwhile=partial(populate, large))
    for flat, part in zip(small, together.split(sizes), strict=True):
        flat.copy_(part)
    return _Unpickler(content, tensors).load()


def _travel(
    begin: Callable[[list[torch.Tensor], int, int], dist.Work],
    peer: int,
    *flats: torch.Tensor,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """`begin`: starts a message from or to a rank. All are under way at once."""
    parts = [part for flat in flats for part in flat.split(_MESSAGE)]
    works = [begin([part], peer, _TAG + i) for i, part in enumerate(parts)]
    meanwhile()
    for work in works:
        work.wait()


def populate(flats: Sequence[torch.Tensor]) -> None:
    """Let the kernel find pages for new memory, whose contents stay.

    Otherwise the thread that receives does it page by page, which can take longer than the link
    does.
    """
    advise = ctypes.CDLL(None).madvise  # a kernel that cannot do it refuses
    for flat in flats:
        start = flat.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = flat.data_ptr() + flat.numel() - start
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _sorted_by_size(whole: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that travel alone, and those that do not. Empty ones do not travel."""
    large = [flat for flat in whole if flat.numel() >= _LARGE]
    return large, [flat for flat in whole if 0 < flat.numel() < _LARGE]
