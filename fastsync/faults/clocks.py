"""Aligns the steady clocks of all ranks, through the rendezvous store.

Ranks of one machine share a clock. Between machines the offset is estimated as by NTP (Mills,
RFC 5905): one rank per machine asks rank 0 for its time, and takes the middle of the shortest of
several round trips for the moment of the answer. The true offset differs by half of that round trip
at most.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from fastsync._torch import PrefixStore, Store

_PINGS = 20


@dataclass(frozen=True)
class ClockOffset:
    """Nanoseconds to add to a rank's steady clock to get rank 0's.

    Attributes:
        offset_ns: nanoseconds.
        error_ns: how far off that may be, in nanoseconds; 0 where both read one clock.
    """

    offset_ns: int
    error_ns: int


def clock_name() -> str:
    """Return a name that is equal on two processes only if they read the same steady clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = Path("/proc/self/ns/time").readlink()
    except OSError:
        return f"host {socket.gethostname()}"
    return f"boot {boot}, {space}"


class Mailbox:
    """A part of the rendezvous store that one exchange uses, with a deadline.

    Not a collective: ranks that are gone cost the others `timeout` seconds, and no more.

    Args:
        store: shared by all ranks.
        place: a name that no other exchange uses.
        timeout: seconds from now until which messages are waited for, all of them together.
    """

    def __init__(self, store: Store, place: str, timeout: float) -> None:
        self._store = PrefixStore(f"fastsync/{place}", store)
        self._deadline = time.monotonic() + timeout

    def halved(self) -> Mailbox:
        """Return the same mailbox with half of the time that is left."""
        twin = copy.copy(self)
        twin._deadline -= max(0.0, self._deadline - time.monotonic()) / 2
        return twin

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def wait(self, key: str) -> None:
        """Wait until there is something under `key`.

        Raises:
            RuntimeError: nothing came in time, or the store is gone.
        """
        left = self._deadline - time.monotonic()
        if left > 0:
            self._store.wait([key], timedelta(seconds=left))
        elif not self._store.check([key]):
            raise RuntimeError(f"nothing came under {key!r} in time")

    def take(self, key: str) -> bytes:
        """Return and delete what is under `key`, once it is there; raise as `wait` does."""
        self.wait(key)
        message: bytes = self._store.get(key)
        self._store.delete_key(key)
        return message

    def read(self, key: str) -> bytes:
        """Return what is under `key` as `take` does, and leave it there for others."""
        self.wait(key)
        message: bytes = self._store.get(key)
        return message


def align_clocks(mail: Mailbox, rank: int, world: int, clock: str = "") -> list[ClockOffset | None]:
    """Return the clock offset of each rank; None for ranks that did not come. Collective.

    Args:
        clock: the name of this rank's clock; `clock_name()` by default.

    Raises:
        RuntimeError: rank 0 did not answer in time.
    """
    mail.put(f"clock/{rank}", clock or clock_name())
    if rank == 0:
        return _lead(mail, world)
    if rank in json.loads(mail.read("leaders")):
        best = min((_ping(mail, rank, i) for i in range(_PINGS)), key=lambda o: o.error_ns)
        mail.put(f"offset/{rank}", json.dumps([best.offset_ns, best.error_ns]))
    entries = json.loads(mail.read("offsets"))
    return [None if entry is None else ClockOffset(*entry) for entry in entries]


def _lead(mail: Mailbox, world: int) -> list[ClockOffset | None]:
    """Do rank 0's part: one rank of each other clock asks for the time.

    The others wait for rank 0, so it must have given up waiting before they do.
    """
    mail = mail.halved()
    clocks = [_clock_of(mail, rank) for rank in range(world)]
    leaders = {clock: clocks.index(clock) for clock in clocks if clock not in (None, clocks[0])}
    mail.put("leaders", json.dumps(list(leaders.values())))
    offsets = {clocks[0]: ClockOffset(0, 0)}
    for clock, leader in leaders.items():
        with contextlib.suppress(RuntimeError):  # it has gone
            offsets[clock] = _answer(mail, leader)
    result = [offsets.get(clock) for clock in clocks]
    mail.put("offsets", json.dumps([o and [o.offset_ns, o.error_ns] for o in result]))
    return result


def _clock_of(mail: Mailbox, rank: int) -> str | None:
    try:
        return mail.take(f"clock/{rank}").decode()
    except RuntimeError:
        return None


def _ping(mail: Mailbox, rank: int, number: int) -> ClockOffset:
    sent = time.monotonic_ns()
    mail.put(f"ping/{rank}/{number}", "")
    mail.wait(f"pong/{rank}/{number}")
    received = time.monotonic_ns()
    theirs = int(mail.take(f"pong/{rank}/{number}"))
    return ClockOffset(theirs - (sent + received) // 2, (received - sent + 1) // 2)


def _answer(mail: Mailbox, rank: int) -> ClockOffset:
    for number in range(_PINGS):
        mail.take(f"ping/{rank}/{number}")
        mail.put(f"pong/{rank}/{number}", str(time.monotonic_ns()))
    return ClockOffset(*json.loads(mail.take(f"offset/{rank}")))
