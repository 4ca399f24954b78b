"""Averages of flat buffers over the ranks: started here, waited for later.

A buffer in fp32 (fp64 where a parameter is) is summed by an all-reduce. Codes are gathered, and
every rank decodes and adds them in the order of the ranks: all get the same bits, and each element
is rounded once, by the rank that it comes from, which keeps what coding lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fastsync._torch import all_gather_flat
from fastsync.faults import consensus
from fastsync.faults.consensus import Statement
from fastsync.reducer import core
from fastsync.reducer.bucket_layout import align_up, dense_layout, slot_layout
from fastsync.reducer.monitor import awaited, watched
from fastsync.wire.formats import AnyCodec, Format

# Called with a mark, as fastsync/timeline has them, the names of the parameters, bytes that have
# left this rank, and nanoseconds on the monotonic clock.
Note = Callable[[str, Sequence[str], int, int], None]

_PLACE = "an average of parameters (sync=)"
_AGREE = "the comparison of steps (sync=)"
_VOTE = "the vote that ends an average (sync=)"
_FILL = 16  # bytes that codes are filled up to


class FlatTensors:
    """Tensors that travel in one flat buffer.

    Args:
        tensors: real ones, on one device.
        codec: what the buffer is coded as, in blocks that never hold elements of two tensors.

    Attributes:
        numel: elements of the buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], codec: AnyCodec | None = None) -> None:
        self.tensors = list(tensors)
        numels = [tensor.numel() for tensor in tensors]
        self._layout = dense_layout(numels) if codec is None else slot_layout(numels, codec.block)
        self.numel = self._layout.numel
        wide = any(tensor.dtype is torch.float64 for tensor in tensors)
        self._dtype = torch.float64 if wide else torch.float32

    def zeros(self) -> torch.Tensor:
        """Return a buffer of zeros."""
        return torch.zeros(self.numel, dtype=self._dtype, device=self.tensors[0].device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor's elements in `flat`, in the tensor's shape."""
        places = zip(self._layout.offsets, self.tensors, strict=True)
        return [flat[begin : begin + t.numel()].view(t.shape) for begin, t in places]

    def pack(self) -> torch.Tensor:
        """Return a new buffer with the values of the tensors."""
        flat = self.zeros()
        torch._foreach_copy_(self.views(flat), [t.detach() for t in self.tensors])
        return flat

    def unpack(self, flat: torch.Tensor, kept: float = 0.0) -> None:
        """Write the values of a buffer to the tensors, each rounded to its dtype.

        Args:
            kept: part of their own values that the tensors keep.
        """
        if kept > 0:
            flat = self.pack().mul_(kept).add_(flat, alpha=1 - kept)
        torch._foreach_copy_([t.detach() for t in self.tensors], self.views(flat))

    def rounded(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the values of a buffer as the tensors would hold them."""
        if all(tensor.dtype is self._dtype for tensor in self.tensors):
            return flat
        held = flat.clone()
        for view, tensor in zip(self.views(held), self.tensors, strict=True):
            view.copy_(view.to(tensor.dtype))
        return held

    @property
    def kept(self) -> int:
        """Return the elements of the buffer that belong to tensors."""
        return sum(self._layout.numels)


@dataclass
class Counters:
    """Costs of averages on this rank.

    Attributes:
        averages: buffers averaged.
        sent_bytes: that left this rank, where collectives are rings.
        seconds: that the host has waited.
    """

    averages: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent within."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun


class Pending:
    """An average that is on its way.

    Args:
        finish: waits for it and returns it.
        counters: those that count the wait.
    """

    def __init__(self, finish: Callable[[], torch.Tensor], counters: Counters) -> None:
        self._finish, self._counters = finish, counters
        self._arrived: torch.Tensor | None = None

    @property
    def arrived(self) -> bool:
        """Return whether nothing is left to wait for."""
        return self._arrived is not None

    @classmethod
    def known(cls, average: torch.Tensor) -> Pending:
        """Return an average that has arrived, as a checkpoint holds it."""
        pending = cls(lambda: average, Counters())
        pending._arrived = average
        return pending

    def wait(self) -> torch.Tensor:
        """Return the average, the same on every rank.

        Raises:
            SyncFault: a rank has ended, or does not come.
        """
        if self._arrived is None:
            with self._counters.waiting():
                self._arrived = self._finish()
        return self._arrived


@dataclass(frozen=True)
class Parts:
    """Groups of a rank whose neighbours have the same parameters: one rank sends for them all.

    Attributes:
        cross: the ranks that have this rank's place in each part.
        inside: the ranks of this rank's part; the first one sends.
    """

    cross: dist.ProcessGroup
    inside: dist.ProcessGroup


def _no_note(mark: str, names: Sequence[str], nbytes: int, time: int) -> None:
    """Record nothing."""


class Exchange:
    """Averages over the ranks of a group that no other collective uses.

    Args:
        group: the ranks.
        model_group: the group of the model, whose ranks compare what they are about to send.
        device: device of the parameters.
        parts: whose ranks have the same parameters; None: no two ranks have.

    Attributes:
        sends: whether this rank does, or another one for it: then `spread` gives what that has.
        note: told of each average, where a timeline records them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        model_group: dist.ProcessGroup,
        device: torch.device,
        parts: Parts | None = None,
    ) -> None:
        self.group, self._model_group, self._device = group, model_group, device
        self._parts, self._between = parts, group if parts is None else parts.cross
        self.sends = parts is None or parts.inside.rank() == 0
        self.counters = Counters()
        self.note: Note = _no_note

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, of which no two have the same parameters."""
        self.group = self._model_group = self._between = group

    def vote(self) -> None:
        """Return once every rank has come here. So all have what came before.

        Raises:
            SyncFault: a rank has ended.
        """
        if self.group.size() > 1:
            with self.counters.waiting():
                watched(self.group, _VOTE, partial(dist.barrier, group=self.group, async_op=True))

    @property
    def world(self) -> int:
        """Return how many ranks send what they have."""
        return self._between.size()

    def compare(self, statement: Statement) -> Callable[[], None]:
        """Start the comparison of what the ranks are about to send.

        Returns:
            A function that ends it, and raises a `RankMismatchError` where they differ.
        """
        if self.group.size() == 1:
            return lambda: None
        mine = torch.tensor(list(statement.digest()), dtype=torch.uint8, device=self._device)
        digests = mine.new_empty(self.group.size() * mine.numel())
        work = all_gather_flat(digests, mine, self.group)
        return partial(self._end_comparison, statement, mine, digests, work)

    def _end_comparison(
        self, statement: Statement, mine: torch.Tensor, digests: torch.Tensor, work: dist.Work
    ) -> None:
        with self.counters.waiting():
            watched(self.group, _AGREE, lambda: work)
        if not statement.error and bool((digests.view(-1, mine.numel()) == mine).all()):
            return
        run = partial(watched, self._model_group, _AGREE)
        failure = "parameters cannot be averaged on every rank;"
        consensus.agree(statement, self._model_group, self._device, failure, run)

    def sum_flat(self, flat: torch.Tensor) -> Pending:
        """Start the average of a buffer, which is the collective's from now on."""
        if self.world == 1 or not self.sends:
            return Pending.known(flat)
        work = dist.all_reduce(flat, group=self._between, async_op=True)
        self.counters.sent_bytes += 2 * flat.nbytes * (self.world - 1) // self.world
        return self._pending(work, lambda: flat.div_(self.world))

    def gather_codes(self, flat: torch.Tensor, codes: Codes) -> Pending:
        """Start the average of a buffer that travels as codes.

        Args:
            flat: what this rank sends, with what earlier codes have lost. It becomes what these
                lose.
        """
        if self.world == 1:
            average = flat.clone()
            flat.zero_()
            return Pending.known(average)
        mine = codes.encode(flat)
        flat.sub_(codes.decode(mine))
        received = mine.new_empty(self.world * mine.numel())
        work = all_gather_flat(received, mine, self._between)
        self.counters.sent_bytes += mine.nbytes * (self.world - 1)
        return self._pending(work, lambda: codes.average(self.world, received))

    def _pending(self, work: dist.Work, average: Callable[[], torch.Tensor]) -> Pending:
        """Return the average of all that send, which `average` makes of what has arrived."""

        def finish() -> torch.Tensor:
            if self._parts is None:
                watched(self.group, _PLACE, lambda: work)
            else:  # those for which another rank sends do not wait here
                awaited(self._between, _PLACE, work)
            return average()

        return Pending(finish, self.counters)

    def spread(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat` with the values of the rank that sends for this one."""
        if self._parts is not None:
            send = partial(dist.broadcast, flat, group_src=0, group=self._parts.inside)
            with self.counters.waiting():
                watched(self._parts.inside, _PLACE, partial(send, async_op=True))
        return flat


@dataclass(frozen=True)
class Codes:
    """The codes of one flat buffer.

    Attributes:
        codec: a format or codec.
        numel: elements of the buffer, a multiple of the codec's block.
        kept: those that are not padding.
    """

    codec: AnyCodec
    numel: int
    kept: int

    def encode(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the bytes that `flat` travels as."""
        whole = getattr(self.codec, "whole", False)
        size = self.codec.coded_bytes(self.kept if whole else self.numel)
        if isinstance(self.codec, Format):
            size = align_up(size, _FILL)
        payload = torch.zeros(size, dtype=torch.uint8, device=flat.device)
        if isinstance(self.codec, Format):
            core.encode([flat], [0], payload, (self.codec.name, self.numel), 1.0)
        else:
            self.codec.encode(flat, payload)
        return payload

    def decode(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the elements that `payload` stands for."""
        flat = torch.zeros(self.numel, dtype=torch.float32, device=payload.device)
        if isinstance(self.codec, Format):
            core.decode([flat], [0], payload, (self.codec.name, self.numel))
        else:
            self.codec.decode(payload, flat)
        return flat

    def average(self, world: int, payloads: torch.Tensor) -> torch.Tensor:
        """Return the average of what all ranks have sent, added up in the order of the ranks."""
        first, *others = payloads.view(world, -1)
        total = self.decode(first)
        for payload in others:
            total.add_(self.decode(payload))
        return total.div_(world)
