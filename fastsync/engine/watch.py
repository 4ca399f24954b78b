"""Looks out for faults of other ranks: one watch for each process group.

csrc/engine/fault_watch.h says how. Here the ranks agree that there is one, and find each other:
each offers an address, or says why not, and all see all offers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from fastsync.build.env import Env
from fastsync.engine import core
from fastsync.ranks.farewell import before_leaving
from fastsync.ranks.faults import SyncFault
from fastsync.ranks.machines import own_address, process_space
from fastsync.ranks.meeting import MeetingPlace
from fastsync.torch_private import Store, gather_objects, group_store, is_gloo

__all__ = [
    "explained",
    "gather_watched",
    "lend_watch",
    "looks_out",
    "meeting_place",
    "open_watch",
    "watch_of",
    "watched",
    "watched_call",
]

T = TypeVar("T")

_log = logging.getLogger("fastsync")
_LOOK = timedelta(milliseconds=50)  # between two looks at the others


@dataclass(frozen=True)
class _Offer:
    """What a rank says of itself.

    Attributes:
        address: host, port and key of its watch; None if it has none.
        process: its number.
        machine: equal on ranks for which process numbers mean the same.
        refusal: why it has no watch; empty if it has.
    """

    address: tuple[str, int, int] | None
    process: int
    machine: str
    refusal: str = ""


@cache
def _watches() -> weakref.WeakKeyDictionary[dist.ProcessGroup, core.FaultWatch]:
    """Those of this process."""
    return weakref.WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> core.FaultWatch | None:
    """The watch of a group, if there is one."""
    return _watches().get(group)


def lend_watch(part: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Who waits in `part`, a group of ranks of `group`, looks out as in `group`."""
    watch = watch_of(group)
    if watch is not None:
        _watches()[part] = watch


def looks_out(group: dist.ProcessGroup) -> bool:
    """Whether a rank can look up from waiting for the others of `group`."""
    return watch_of(group) is not None and is_gloo(group)


def open_watch(group: dist.ProcessGroup) -> str:
    """Has the ranks of `group` look out for each other, from its first model on. Collective.

    Returns:
        Why they do not, which rank 0 logs: a rank sets ``FASTSYNC_WATCH=0`` or cannot listen.
        Empty where they do, or there is nobody to look out for.
    """
    store = group_store(group)
    if group.size() == 1 or store is None or group in _watches():
        return ""
    watch, offer = _make_offer(store)
    offers = gather_objects(offer, group)
    refusal = _why_not(offers)
    if watch is None or refusal:
        if group.rank() == 0:
            _log.info("fastsync: nobody looks out for faults: %s", refusal)
        return refusal
    addresses = [(*o.address, o.process, o.machine) for o in offers if o.address is not None]
    missing = watch.connect(addresses, group.rank())
    if missing:
        _log.warning("fastsync: no connection for news of faults to ranks %s", missing)
    _watches()[group] = watch
    before_leaving(watch)
    return ""


@contextlib.contextmanager
def explained(group: dist.ProcessGroup, place: str) -> Iterator[None]:
    """Turns an error of a backend into one that names the ranks that have ended, if any have.

    Args:
        place: what this rank is in, as it should read in the error.

    Raises:
        SyncFault: with the backend's words at its end.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        watch = watch_of(group)
        if watch is not None and not isinstance(error, SyncFault):
            watch.explain(place, str(error), time.monotonic() - start)
        raise


def watched(group: dist.ProcessGroup, place: str, start: Callable[[], dist.Work]) -> None:
    """Runs a collective. Who waits in it looks out for ranks that have ended.

    A ring's collective fails on the neighbours of such a rank, and hangs on all others.

    Args:
        place: what this rank is in, as it should read in an error.
        start: begins the collective.

    Raises:
        SyncFault: a rank has ended, or the backend has failed because of one.
    """
    with explained(group, place):
        work = start()
        if looks_out(group):
            _look_until(partial(_is_over, work), group, place)
        else:
            work.wait()


def watched_call(group: dist.ProcessGroup, place: str, call: Callable[[], T]) -> T:
    """What `call` returns, which waits for other ranks and cannot look up.

    It runs on a thread of its own, which is left to itself where a rank has ended: nobody can end
    such a wait, and nobody waits for that thread.

    Args:
        place: what this rank is in, as it should read in an error.

    Raises:
        SyncFault: a rank has ended, or `call` has failed because of one.
    """
    made: Future[T] = Future()
    with explained(group, place):
        threading.Thread(target=_fulfil, args=(made, call), daemon=True).start()
        _look_until(lambda: bool(wait([made], _LOOK.total_seconds()).done), group, place)
        return made.result()


def gather_watched(mine: T, group: dist.ProcessGroup, place: str) -> list[T]:
    """What every rank of `group` passes, by rank: anything that can be pickled. Collective.

    Args:
        place: what this rank is in, as it should read in an error.

    Raises:
        SyncFault: a rank has ended.
    """
    if not looks_out(group):
        with explained(group, place):
            return gather_objects(mine, group)
    own = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = _gather_rows(torch.tensor([own.numel()], device="cpu"), group, place)
    padded = own.new_zeros(max(int(size) for size in sizes))
    padded[: own.numel()] = own
    rows = _gather_rows(padded, group, place)
    pairs = zip(rows, sizes, strict=True)
    return [cast(T, pickle.loads(row[: int(size)].numpy().tobytes())) for row, size in pairs]


def _gather_rows(mine: torch.Tensor, group: dist.ProcessGroup, place: str) -> list[torch.Tensor]:
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    watched(group, place, partial(dist.all_gather, rows, mine, group=group, async_op=True))
    return rows


def _fulfil(made: Future[T], call: Callable[[], T]) -> None:
    try:
        made.set_result(call())
    except BaseException as error:
        made.set_exception(error)


def _look_until(is_over: Callable[[], bool], group: dist.ProcessGroup, place: str) -> None:
    """Looks out for ranks that have ended until `is_over`, which waits for a moment."""
    watch, begun = watch_of(group), time.monotonic()
    while not is_over():
        if watch is not None:
            watch.look(place, time.monotonic() - begun)


def _is_over(work: dist.Work) -> bool:
    """Waits for a moment. Raises where the collective has failed."""
    try:
        work.wait(_LOOK)
    except RuntimeError:  # that time is over, too, and it may end just now
        if not work.is_completed():
            return False
        work.wait()
    return True


def meeting_place(group: dist.ProcessGroup, name: str, timeout: float) -> MeetingPlace:
    """Where ranks that wait for each other look out for faults. See `MeetingPlace`."""

    def look(reason: str, waited: float) -> None:
        watch = watch_of(group)
        if watch is not None:
            watch.look(reason, waited)

    return MeetingPlace(group, name, timeout, look)


def _make_offer(store: Store) -> tuple[core.FaultWatch | None, _Offer]:
    process, machine = os.getpid(), process_space()
    env = Env.read()
    if not env.watch:
        return None, _Offer(None, process, machine, "FASTSYNC_WATCH is 0")
    try:
        stacks = _Stacks.of_main_thread()
        watch = core.make_watch(own_address(store), env.stall_warn, stacks.file, stacks.signal)
    except (OSError, RuntimeError) as error:
        return None, _Offer(None, process, machine, str(error))
    return watch, _Offer(watch.address(), process, machine)


def _why_not(offers: Sequence[_Offer]) -> str:
    for rank, offer in enumerate(offers):
        if offer.address is None:
            return f"on rank {rank}, {offer.refusal}"
        alone = offer.address[0].startswith("127.")
        if alone and any(other.machine != offer.machine for other in offers):
            return f"rank {rank} has only found an address of its own machine, {offer.address[0]}"
    return ""


@dataclass(frozen=True)
class _Stacks:
    """Where a signal has the main thread write its Python stack; it needs no GIL for that.

    Attributes:
        file: -1 where nothing does.
        signal: its number.
    """

    file: int = -1
    signal: int = 0

    @staticmethod
    def of_main_thread() -> _Stacks:
        if threading.current_thread() is not threading.main_thread():
            return _Stacks()
        return _registered()


@cache
def _registered() -> _Stacks:
    number = signal.SIGRTMAX - 7
    if signal.getsignal(number) is not signal.SIG_DFL:
        return _Stacks()
    file = os.memfd_create("fastsync stacks", os.MFD_CLOEXEC)
    faulthandler.register(number, file, all_threads=False)
    return _Stacks(file, number)
