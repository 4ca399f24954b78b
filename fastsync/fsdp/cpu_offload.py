"""Shares that stay on the CPU while their unit computes on another device: CPUOffloadPolicy.

Each way then has one more copy, of one flat tensor::

    gather   shares on the CPU  ->  a copy on the device  ->  messages  ->  whole parameters
    reduce   sums on the device  ->  a copy on the CPU  ->  gradients of the shares

Each direction has a stream of its own, which waits for what the device has been given so far. So a
unit that is gathered ahead of time is copied, packed and sent while the one before it computes, and
sums leave while backward goes on. The host waits before it reads what comes, and before shares that
are still read may be written to.

What is allocated on such a stream is read elsewhere, and may still be freed at any time: the
allocator gives it to the same stream alone, which has waited for the computation before it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

# Where shares, their gradients and optimizers' states stay.
HOME = torch.device("cpu")


class CopyAlways(CPUOffloadPolicy):
    """Policy that makes units on the CPU stage their shares as those on other devices do.

    It is of use only to test that way where there is no such device.
    """


@dataclass(frozen=True)
class Offload:
    """Shares stay on the CPU; `pinned`: in memory that devices read and write by themselves."""

    pinned: bool

    @classmethod
    def of(cls, policy: object, device: torch.device) -> Offload | None:
        """None: shares are where units compute, on `device`."""
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        if device.type == HOME.type and not isinstance(policy, CopyAlways):
            return None
        return cls(policy.pin_memory and device.type != HOME.type)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the CPU."""
        return torch.empty(numel, dtype=dtype, device=HOME, pin_memory=self.pinned)


@dataclass(frozen=True)
class Arriving:
    """Tensor that a copy brings; `done`: an event after the copy, None where no wait is needed."""

    tensor: torch.Tensor
    done: Any = None

    def wait(self) -> torch.Tensor:
        """Return the tensor, which the host may read."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensor


class Staging:
    """No staging: a unit gathers its shares from where they lie, and its sums become gradients
    there.
    """

    copies = False

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    @property
    def source(self) -> torch.Tensor:
        """Return the tensor that is gathered, the same each time."""
        return self._shard

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Give `source` the values of the shares; gathers of it start within."""
        yield

    def arrived(self) -> None:
        """Note that `source` is not read any more; the computation may use what was started."""

    def wait(self) -> None:
        """Wait until shares may be written to."""

    def bring(self, sums: torch.Tensor) -> Arriving:
        """Start to bring sums to where the shares are."""
        return Arriving(sums)


class _Copies(Staging):
    """Staging between the CPU and `device`."""

    copies = True

    def __init__(self, shard: torch.Tensor, offload: Offload, device: torch.device) -> None:
        super().__init__(shard)
        self._offload, self._device = offload, device
        self._streams = _streams_of(device)
        self._filled = False
        self._copied, self._started = self._streams.module.Event(), self._streams.module.Event()

    @cached_property
    def source(self) -> torch.Tensor:
        """Return the tensor that is gathered; it has memory only between `sending()` and
        `arrived()`.
        """
        with torch.inference_mode(False):
            made = torch.empty(self._shard.numel(), dtype=self._shard.dtype, device=self._device)
        made.untyped_storage().resize_(0)
        return made

    @contextmanager
    def sending(self) -> Iterator[None]:
        if self._filled:
            yield
            return
        stream = self._streams.out
        with self._streams.beside(stream):
            self._fill()
            self._copied.record(stream)
            yield
            self._started.record(stream)

    @torch.no_grad()
    def _fill(self) -> None:
        self.source.untyped_storage().resize_(self._shard.nbytes)
        self._filled = True
        self.source.copy_(self._shard, non_blocking=True)

    def arrived(self) -> None:
        if self._filled:
            self._streams.current().wait_event(self._started)
            self.source.untyped_storage().resize_(0)
            self._filled = False

    def wait(self) -> None:
        self._copied.synchronize()

    @torch.no_grad()
    def bring(self, sums: torch.Tensor) -> Arriving:
        stream = self._streams.back
        home = self._offload.empty(sums.numel(), sums.dtype)
        done = self._streams.module.Event()
        with self._streams.beside(stream):
            home.copy_(sums, non_blocking=True)
            done.record(stream)
        if self._device.type != HOME.type:
            sums.record_stream(stream)
        return Arriving(home, done)


def staging_of(shard: torch.Tensor, device: torch.device, offload: Offload | None) -> Staging:
    """Return the staging of shares that units on `device` compute with."""
    return Staging(shard) if offload is None else _Copies(shard, offload, device)


@dataclass(frozen=True)
class _Streams:
    """A device's streams for copies: `out` to it, and `back` to the CPU."""

    device: torch.device
    module: ModuleType
    out: Any
    back: Any

    def current(self) -> Any:
        return self.module.current_stream(self.device)

    @contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """Run what is within after what the device has been given so far, and nothing later."""
        stream.wait_stream(self.current())
        with self.module.stream(stream):
            yield


@cache
def _streams_of(device: torch.device) -> _Streams:
    """Return one pair for all units: memory that one has freed serves the next
    on the same stream.
    """
    module = torch.get_device_module(device)
    return _Streams(device, module, module.Stream(device), module.Stream(device))
