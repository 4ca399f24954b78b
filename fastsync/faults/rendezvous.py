"""A meeting point for all ranks with a deadline, which can name the ranks that did not come.

A collective that some rank never enters hangs until the backend's timeout, half an hour by default.
Where ranks have to change course together, they first meet here, through the rendezvous store.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from fastsync._torch import Store, group_store
from fastsync.faults.stores import served_at
from fastsync.faults.sync_fault import SyncFault

_REMEDY = "Every rank has to make that change before the same forward"
_OFTEN, _LAST_LOOK = 0.1, 2.0  # seconds between looks at the others
_FIRST_NAP, _LAST_NAP = 0.001, 0.03  # and between questions whether they have come
_ASKING = 2000.0  # ranks that may ask the store in a second, once they have waited for long
_ANSWERS = 1.0  # seconds for a store to take a connection
_STAYS = 0.3  # for ranks whose time is over, too: this one may serve the store that they ask
WaitScope = Callable[[str], contextlib.AbstractContextManager[Callable[[], None]]]


class UnreachableStoreError(RuntimeError):
    """A rank has lost its connection to the rendezvous store, which it needs."""


@contextlib.contextmanager
def _alone(reason: str) -> Iterator[Callable[[], None]]:
    """Wait without a watch for faults."""
    yield lambda: None


class Rendezvous:
    """Place where the ranks of a group meet, time and again.

    Args:
        group: group whose ranks meet.
        name: name of the place; equal on all ranks.
        timeout: seconds that a rank waits for the others.
        wait_scope: context manager, entered with the reason while this rank waits. It yields a
            function that is called again and again, and raises where a rank has ended.
        number_of: returns what errors call a rank of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        timeout: float,
        wait_scope: WaitScope = _alone,
        number_of: Callable[[int], int] = int,
    ) -> None:
        self._group, self._rank, self._world = group, group.rank(), group.size()
        self._store = group_store(group) if self._world > 1 else None
        self._name, self._timeout, self._wait_scope = name, timeout, wait_scope
        self._number_of = number_of
        self._meetings = 0
        self._statement = ""
        if self._store is not None:
            # Ranks open their places in one order, two of one name too.
            base = f"fastsync/{group.group_name}/{name}"
            with needing_store(group, "meetings of the ranks"):
                self._name = f"{base}-{self._store.add(f'{base}/{self._rank}', 1)}"

    @property
    def name(self) -> str:
        """Return the name of the place, which no other place has."""
        return self._name

    def meet(self, reason: str, statement: str = "", remedy: str = _REMEDY) -> bool:
        """Wait until every rank has come.

        Args:
            reason: what the ranks meet for, as an error says it.
            statement: a text that this rank tells the others.
            remedy: what the script should do instead, as an error says it.

        Returns:
            Whether all ranks said the same. False where there is no store.

        Raises:
            SyncFault: not all ranks came in time; names those that did not.
            UnreachableStoreError: there is no store any more.
        """
        store, self._meetings = self._store, self._meetings + 1
        if store is None:
            return self._world == 1
        with needing_store(self._group, reason):
            return self._meet(store, reason, statement, remedy)

    def _meet(self, store: Store, reason: str, statement: str, remedy: str) -> bool:
        place = f"{self._name}-{self._meetings}"
        store.set(f"{place}/{self._rank}", "here")
        store.add(f"{place}/statement {statement}", 1)
        if store.add(f"{place}/count", 1) == self._world:
            # The last rank to be counted finds that every rank has spoken.
            alike = store.add(f"{place}/statement {statement}", 0) == self._world
            store.set(f"{place}/all", "alike" if alike else "unlike")
        with self._wait_scope(f"a meeting for {reason}") as look:
            if absent := list(map(self._number_of, self._absent(store, place, look))):
                raise SyncFault(
                    f"rank {self._number_of(self._rank)} waited {self._timeout:g} s for {reason}, "
                    f"but ranks {absent} did not come. {remedy}",
                    absent,
                    seconds=self._timeout,
                    reason="did not come",
                )
        verdict = store.get(f"{place}/all") == b"alike"
        self._clear(store, f"{self._name}-{self._meetings - 1}", self._statement)
        self._statement = statement
        return verdict

    def _absent(self, store: Store, place: str, look: Callable[[], None]) -> list[int]:
        """Wait, and return the ranks that have not come in time."""
        start, waited, pauses = time.monotonic(), 0.0, looks(self._world)
        while not _comes(store, f"{place}/all", min(next(pauses), self._timeout - waited)):
            waited = time.monotonic() - start
            look()
            if waited >= self._timeout:
                absent = [r for r in range(self._world) if not store.check([f"{place}/{r}"])]
                time.sleep(_STAYS)
                return absent
        return []

    def _clear(self, store: Store, former: str, statement: str) -> None:
        """Delete the keys of the former meeting: every rank is here, so none
        reads them any more.
        """
        store.delete_key(f"{former}/{self._rank}")
        store.delete_key(f"{former}/statement {statement}")
        if self._rank == 0:
            store.delete_key(f"{former}/count")
            store.delete_key(f"{former}/all")


@contextlib.contextmanager
def needing_store(group: dist.ProcessGroup, reason: str) -> Iterator[None]:
    """Name the store in errors of the store that `group` was made with.

    Args:
        reason: what this rank needs the store for.

    Raises:
        UnreachableStoreError: the store cannot be reached.
    """
    try:
        yield
    except dist.DistError as error:
        store = group_store(group)
        served = None if store is None else served_at(store)
        place = "" if served is None else f" at {served[0]}:{served[1]}"
        raise UnreachableStoreError(
            f"rank {group.rank()} cannot reach the rendezvous store{place}, which it needs for "
            f"{reason} ({error}). {_why_unreachable(served)}: restart from a checkpoint"
        ) from error


def _why_unreachable(served: tuple[str, int] | None) -> str:
    if served is not None:
        with contextlib.suppress(OSError), socket.create_connection(served, timeout=_ANSWERS):
            return "The store takes new connections, so only the one of this rank has been lost"
    return (
        "The process that serves it, rank 0 or the launcher, has ended, or its machine cannot be "
        "reached"
    )


def looks(world: int) -> Iterator[float]:
    """Seconds until each next look. One asks the store: among many ranks they become rarer."""
    rarest = min(world / _ASKING, _LAST_LOOK)
    pause = _OFTEN
    while True:
        pause = min(2 * pause, rarest) if rarest > _OFTEN else _OFTEN
        yield pause


def _comes(store: Store, key: str, seconds: float) -> bool:
    """Return whether a key exists. A wait in vain takes some stores a second, and others write that
    on stderr, so short ones ask instead.
    """
    deadline = time.monotonic() + seconds
    try:
        if seconds > _OFTEN:
            store.wait([key], timedelta(seconds=seconds))
            return True
        nap = _FIRST_NAP
        while not store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(nap, _LAST_NAP))
            nap *= 2
        return True
    except RuntimeError:  # each kind of store has its own
        time.sleep(max(0.0, deadline - time.monotonic()))  # a store that has gone fails at once
        return False
