"""Watch for faults of other ranks: one watch for each process group.

csrc/fault/fault_watch.h says how it works. Here the ranks agree that there is one, and find each
other: each offers an address, or says why not, and all see all offers. Until then the rendezvous
store tells which ranks have come.

Wherever Python brings all ranks together, they enter a wait scope. A rank that waits there watches
for ranks that have ended, and warns of those that are late.
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
from ipaddress import ip_address
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import (
    Store,
    gather_objects,
    group_store,
    group_timeout,
    is_gloo,
    talks_by_gloo,
)
from fastsync.faults.barrier import Arrivals, ExitReasons
from fastsync.faults.exit_reasons import before_leaving
from fastsync.faults.machines import own_address, process_space
from fastsync.faults.rendezvous import Rendezvous, UnreachableStoreError, needing_store
from fastsync.faults.stores import limit_silence
from fastsync.faults.sync_fault import SyncFault
from fastsync.reducer import core

T = TypeVar("T")
Start = Callable[[], dist.Work]

_log = logging.getLogger("fastsync")
_LOOK = timedelta(milliseconds=50)  # between two looks at the others
_NO_STACKS = (-1, 0)
_WRAPPING = "the wrapping of the model"


class _WaitScope(Protocol):
    """Wait of this rank for others; see csrc/fault/fault_watch.h."""

    def look(self) -> None: ...
    def explain(self, error: str) -> None: ...
    def end(self, came: bool) -> None: ...


@dataclass(frozen=True)
class _Offer:
    """One rank's statement about itself, before the ranks watch each other.

    Attributes:
        address: host, port and key of its watch; None if it has none.
        process: its process number.
        machine: equal on ranks for which process numbers mean the same.
        refusal: why it has no watch; empty if it has.
    """

    address: tuple[str, int, int] | None
    process: int
    machine: str
    refusal: str = ""


@dataclass(frozen=True)
class _Monitor:
    """Watch of the ranks of a group.

    Attributes:
        ranks: ranks of the group, as the watch counts them.
        lent: it is the watch of more ranks.
    """

    watch: core.FaultWatch
    ranks: tuple[int, ...]
    lent: bool = False


@cache
def _monitors() -> weakref.WeakKeyDictionary[dist.ProcessGroup, _Monitor]:
    """Return the watches of this process, by group."""
    return weakref.WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup) -> core.FaultWatch | None:
    """Return the watch of a group, if there is one."""
    monitor = _monitors().get(group)
    return None if monitor is None else monitor.watch


def lend_watch(part: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Let ranks that wait in `part`, a group of ranks of `group`, watch as in `group`."""
    monitor = _monitors().get(group)
    if monitor is not None:
        known = dict(zip(dist.get_process_group_ranks(group), monitor.ranks, strict=True))
        ranks = tuple(known[rank] for rank in dist.get_process_group_ranks(part))
        _monitors()[part] = _Monitor(monitor.watch, ranks, lent=True)


def numbers_of(group: dist.ProcessGroup) -> Sequence[int]:
    """Return the ranks of `group` as its watch counts them, and as errors name them."""
    monitor = _monitors().get(group)
    return range(group.size()) if monitor is None else monitor.ranks


def numbers_in_watch(group: dist.ProcessGroup) -> Sequence[int]:
    """Return the same; nothing where its watch has no other ranks."""
    monitor = _monitors().get(group)
    return monitor.ranks if monitor is not None and monitor.lent else ()


def number_of(group: dist.ProcessGroup, rank: int | None = None) -> int:
    """Return what errors call a rank of `group`, this one by default."""
    return numbers_of(group)[group.rank() if rank is None else rank]


def looks_out(group: dist.ProcessGroup) -> bool:
    """Return whether a rank can check for faults while it waits for the others of `group`."""
    return watch_of(group) is not None and is_gloo(group)


@cache
def _exit_reasons() -> weakref.WeakKeyDictionary[dist.ProcessGroup, ExitReasons]:
    """Return the exit reasons of this process, by groups whose ranks are going
    to watch each other.
    """
    return weakref.WeakKeyDictionary()


def expect_watch(group: dist.ProcessGroup) -> None:
    """Prepare to tell the other ranks why this rank's script raises before `open_watch`, if it
    does.
    """
    store = group_store(group)
    if group.size() == 1 or store is None or group in _monitors() or group in _exit_reasons():
        return
    reasons = ExitReasons(store, group.group_name, group.rank())
    _exit_reasons()[group] = reasons
    before_leaving(reasons)


def open_watch(group: dist.ProcessGroup, obstacle: str = "") -> str:
    """Let the ranks of `group` watch each other, from its first model on. Collective.

    Args:
        obstacle: why this rank will not wrap a model.

    Returns:
        Why they do not watch each other, which rank 0 logs: a rank has an obstacle, sets
        ``FASTSYNC_WATCH=0``, or cannot listen. Empty where they do, or where the group has one
        rank.

    Raises:
        SyncFault: a rank has not come in time, or has ended before.
        UnreachableStoreError: this rank has lost the store; the others know that it is here.
    """
    store = group_store(group)
    if group.size() == 1 or store is None or group in _monitors():
        return ""
    with contextlib.suppress(ValueError):  # of the environment, which is an obstacle
        limit_silence(store, Env.read().lost_after)
    watch, offer = _make_offer(store, obstacle)
    offers = _first_offers(offer, group, store)
    refusal = _why_not(offers)
    if watch is None or refusal:
        if group.rank() == 0:
            _log.info("fastsync: nobody looks out for faults: %s", refusal)
        return refusal
    addresses = [(*o.address, o.process, o.machine) for o in offers if o.address is not None]
    missing = watch.connect(addresses, group.rank())
    if missing:
        _log.warning("fastsync: no connection for reports of faults to ranks %s", missing)
    _monitors()[group] = _Monitor(watch, tuple(range(group.size())))
    before_leaving(watch)
    _exit_reasons().pop(group, None)
    return ""


def _make_offer(store: Store, obstacle: str) -> tuple[core.FaultWatch | None, _Offer]:
    """Return this rank's offer, and its watch, not yet connected to others, if it has one.

    Args:
        obstacle: why it will not wrap a model; empty if it will.
    """
    process, machine = os.getpid(), process_space()
    if obstacle:
        return None, _Offer(None, process, machine, obstacle)
    env = Env.read()
    if not env.watch:
        return None, _Offer(None, process, machine, "FASTSYNC_WATCH is 0")
    try:
        in_main = threading.current_thread() is threading.main_thread()
        stacks = _stacks_of_main_thread() if in_main else _NO_STACKS
        times = (env.stall_warn, env.lost_after)
        watch = core.FaultWatch(own_address(store), *times, *stacks, SyncFault)
    except (OSError, RuntimeError) as error:
        return None, _Offer(None, process, machine, str(error))
    return watch, _Offer(watch.address(), process, machine)


@cache
def _stacks_of_main_thread() -> tuple[int, int]:
    """Return the file and the number of the signal with which the main thread writes its Python
    stack, without the GIL.
    """
    number = signal.SIGRTMAX - 7
    if signal.getsignal(number) is not signal.SIG_DFL:
        return _NO_STACKS
    file = os.memfd_create("fastsync stacks", os.MFD_CLOEXEC)
    faulthandler.register(number, file, all_threads=False)
    return file, number


def _why_not(offers: Sequence[_Offer]) -> str:
    """Return why ranks with these offers cannot watch each other; empty where they can."""
    for rank, offer in enumerate(offers):
        if offer.address is None:
            return f"on rank {rank}, {offer.refusal}"
        alone = ip_address(offer.address[0]).is_loopback
        if alone and any(other.machine != offer.machine for other in offers):
            return f"rank {rank} has only found an address of its own machine, {offer.address[0]}"
    return ""


def _first_offers(mine: _Offer, group: dist.ProcessGroup, store: Store) -> list[_Offer]:
    """Gather every rank's offer, while only the store can tell of faults. Collective."""
    try:
        warn_after = Env.read().stall_warn
    except ValueError:  # which is an obstacle
        warn_after = Env.stall_warn
    me, scope, lost = (group.group_name, group.rank(), group.size()), None, None
    looks = talks_by_gloo(group)
    try:
        with needing_store(group, _WRAPPING):
            scope = Arrivals(store, me, warn_after, _has_ended, looks)
    except UnreachableStoreError as error:
        # The others would say that this rank has not come, so it tells them in the group.
        mine, lost = _Offer(None, mine.process, mine.machine, str(error)), error
    if looks:
        offers = _gather(mine, group, partial(_wait, scope))
    else:
        with _explained_by(scope):
            offers = gather_objects(mine, group)
    if lost is not None:
        raise lost
    if scope is not None:
        scope.passed()
    return offers


def _has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended; only then is there an extension."""
    return core.process_has_ended(process)


def explained(group: dist.ProcessGroup, label: str) -> contextlib.AbstractContextManager[None]:
    """Turn an error of a backend into one that names the ranks that have ended, if any have.

    Args:
        label: what this rank is in, as it should read in the error.

    Raises:
        SyncFault: with the backend's words at its end.
    """
    return _explained_by(_wait_scope(group, label, "apart"))


def explain_end(group: dist.ProcessGroup, label: str, rank: int, error: str) -> None:
    """Raise a `SyncFault` that says how `rank` of `group` has ended, if that is known.

    Args:
        label: what this rank is in, as it should read in the error.
        error: what tells that the rank has ended.
    """
    monitor = _monitors().get(group)
    if monitor is not None:
        scope = monitor.watch.wait_scope("apart", label, [monitor.ranks[rank]])
        try:
            scope.explain(error)
        finally:
            scope.end(False)


@contextlib.contextmanager
def wrapping(group: dist.ProcessGroup) -> Iterator[None]:
    """Name ranks that end while a model is wrapped, and ranks that share a GPU.

    Raises:
        RuntimeError: NCCL, which makes its communicator at the first collective, refuses `group`
            because two of its ranks use the same GPU.
    """
    with _explained_by(_wait_scope(group, _WRAPPING, "wrapping")):
        try:
            yield
        except dist.DistBackendError as error:
            if "Duplicate GPU" not in str(error):
                raise
            raise RuntimeError(
                "two ranks use the same GPU, which NCCL refuses: call torch.cuda.set_device(int("
                "os.environ['LOCAL_RANK'])) before init_process_group(), and start no more ranks "
                f"on a machine than it has GPUs. NCCL says: {error}"
            ) from error


def _wait_scope(
    group: dist.ProcessGroup, label: str, kind: str = "together", speaks: bool = False
) -> _WaitScope | None:
    """Begin a scope of this rank; return None without a watch.

    Args:
        kind: "together" if each rank of `group` comes here as often as the others, and waits.
        speaks: this rank warns of a long wait itself, whoever else waits.
    """
    monitor = _monitors().get(group)
    if monitor is None:
        return None
    ranks: Sequence[int] = monitor.ranks
    if speaks:  # the first of the ranks that are not late warns for all
        ranks = sorted(ranks, key=lambda rank: rank != monitor.ranks[group.rank()])
    return monitor.watch.wait_scope(kind, label, ranks)


@contextlib.contextmanager
def _explained_by(scope: _WaitScope | None) -> Iterator[None]:
    """End the scope."""
    if scope is None:
        yield
        return
    came = False
    try:
        yield
        came = True
    except RuntimeError as error:
        came = True  # where others are to blame
        if not isinstance(error, SyncFault):
            scope.explain(str(error))
            came = False
        raise
    finally:
        scope.end(came)


def watched(group: dist.ProcessGroup, label: str, start: Start, on_cpu: bool = False) -> None:
    """Run a collective. A rank that waits in it watches for ranks that have ended, or are late.

    A ring's collective fails on the neighbours of a rank that has ended, and hangs on all others.

    Args:
        label: what this rank is in, as it should read in an error.
        start: begins the collective.
        on_cpu: it is one of CPU tensors.

    Raises:
        SyncFault: a rank has ended, or the backend has failed because of one.
    """
    _run(_wait_scope(group, label), group, start, on_cpu)


def awaited(group: dist.ProcessGroup, label: str, work: dist.Work) -> None:
    """Wait as `watched` does for a collective that has been started.

    Some ranks may reach it by another way than this function.
    """
    _run(_wait_scope(group, label, "apart"), group, lambda: work)


def _run(
    scope: _WaitScope | None, group: dist.ProcessGroup, start: Start, on_cpu: bool = False
) -> None:
    if scope is not None and (is_gloo(group) or (on_cpu and talks_by_gloo(group))):
        _wait(scope, start)
        return
    with _explained_by(scope):
        start().wait()


def _wait(scope: _WaitScope | None, start: Start) -> None:
    with _explained_by(scope):
        work = start()
        while not is_over(work):
            if scope is not None:
                scope.look()


def come_together(group: dist.ProcessGroup, label: str) -> None:
    """Return once all ranks of `group` have come, where ranks can check while they wait.
    Collective.

    The wait that follows cannot check for faults, so no rank may still be late when it begins.
    """
    if looks_out(group):
        watched(group, label, partial(dist.barrier, group=group, async_op=True))


def watched_call(
    group: dist.ProcessGroup, label: str, call: Callable[[], T], within: timedelta | None = None
) -> T:
    """Return the result of `call`, which waits for other ranks and cannot check for faults.

    It runs on a thread of its own. Where a rank has ended, that thread is left to itself: such a
    wait cannot be ended, and the thread is not joined.

    Args:
        label: what this rank is in, as it should read in an error.
        within: how long ranks that are late are waited for; None: as long as `call` does.

    Raises:
        SyncFault: a rank has ended, is late, or `call` has failed because of one.
    """
    made: Future[T] = Future()
    scope, begun = _wait_scope(group, label), time.monotonic()
    with _explained_by(scope):
        threading.Thread(target=_fulfil, args=(made, call), daemon=True).start()
        while not wait([made], _LOOK.total_seconds()).done:
            if scope is not None:
                scope.look()
                if within is not None and time.monotonic() - begun > within.total_seconds():
                    scope.explain(f"timed out after {within.total_seconds():g} s")
                    within = None  # no rank is late
        return made.result()


def gather_watched(mine: T, group: dist.ProcessGroup, label: str) -> list[T]:
    """Return what every rank of `group` passes, by rank: anything that can be pickled. Collective.

    Args:
        label: what this rank is in, as it should read in an error.

    Raises:
        SyncFault: a rank has ended.
    """
    if watch_of(group) is not None and talks_by_gloo(group):
        return _gather(mine, group, partial(watched, group, label, on_cpu=True))
    with _explained_by(_wait_scope(group, label)):
        return gather_objects(mine, group)


def _gather(mine: T, group: dist.ProcessGroup, run: Callable[[Start], None]) -> list[T]:
    """Gather as `gather_watched` does, over Gloo; `run` waits for the
    collectives that it is given.
    """
    own = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = _gather_rows(torch.tensor([own.numel()], device="cpu"), group, run)
    padded = own.new_zeros(max(int(size) for size in sizes))
    padded[: own.numel()] = own
    rows = _gather_rows(padded, group, run)
    pairs = zip(rows, sizes, strict=True)
    return [cast(T, pickle.loads(row[: int(size)].numpy().tobytes())) for row, size in pairs]


def _gather_rows(
    mine: torch.Tensor, group: dist.ProcessGroup, run: Callable[[Start], None]
) -> list[torch.Tensor]:
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    run(partial(dist.all_gather, rows, mine, group=group, async_op=True))
    return rows


def _fulfil(made: Future[T], call: Callable[[], T]) -> None:
    try:
        made.set_result(call())
    except BaseException as error:
        made.set_exception(error)


def is_over(work: dist.Work) -> bool:
    """Return whether a collective over Gloo is over, after a short wait. Raise if it has failed."""
    try:
        work.wait(_LOOK)
    except RuntimeError:  # that time is over, too, and it may end just now
        if not work.is_completed():
            return False
        work.wait()
    return True


def looker(group: dist.ProcessGroup, label: str) -> Callable[[], None]:
    """Return a function that raises a `SyncFault` where a rank has ended, for a waiting thread.

    It also warns of a long wait, for this rank alone.

    Args:
        label: what it is in, as it should read in the error and in the warning.
    """
    scope = _wait_scope(group, label, "apart", speaks=True)
    return (lambda: None) if scope is None else scope.look


@contextlib.contextmanager
def answer_of(group: dist.ProcessGroup, label: str, rank: int) -> Iterator[Callable[[], None]]:
    """Warn of `rank` of `group` while a thread waits for its answer and checks now and then.

    A rank whose script has come to its end may still answer, so its end is not looked for at once.

    Args:
        label: what this rank is in, as it should read in a warning and an error.

    Yields:
        A function that may raise a `SyncFault`, and at the group's timeout a `TimeoutError` at
        least.
    """
    monitor, begun, timeout = _monitors().get(group), time.monotonic(), group_timeout(group)
    scope: _WaitScope | None = None
    if monitor is not None:
        both = [monitor.ranks[group.rank()], monitor.ranks[rank]]  # the first says which is late
        scope = monitor.watch.wait_scope("apart", label, both)

    def look() -> None:
        waited = time.monotonic() - begun
        if scope is not None and waited >= Env.read().stall_warn:
            scope.look()
        if timeout is not None and waited > timeout.total_seconds():
            late = number_of(group, rank)
            text = f"rank {late} did not come within {timeout.total_seconds():g} s"
            if scope is not None:
                scope.explain(text)
            raise TimeoutError(text)

    try:
        yield look
    finally:
        if scope is not None:
            scope.end(False)


def make_rendezvous(group: dist.ProcessGroup, name: str, timeout: float) -> Rendezvous:
    """Return the rendezvous at which ranks that wait for each other watch for faults. See
    `Rendezvous`.
    """

    @contextlib.contextmanager
    def wait_scope(reason: str) -> Iterator[Callable[[], None]]:
        scope, came = _wait_scope(group, reason), False
        try:
            yield (lambda: None) if scope is None else scope.look
            came = True
        finally:
            if scope is not None:
                scope.end(came)

    return Rendezvous(group, name, timeout, wait_scope, partial(number_of, group))
