"""The first meeting of a group, and the ranks that have come to it, as the rendezvous store knows
them.

Until this meeting is over, no rank watches others. A rank that waits can still name one that does
not come, or that comes and ends, and says why if that one has left its reason. A rank that comes
and then stops is found by asking: a rank whose time is over asks in the store, and all ranks that
still wait, or are through, say there that they are awake.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

from fastsync._torch import Store
from fastsync.faults.machines import process_space
from fastsync.faults.sync_fault import SyncFault
from fastsync.faults.wording import name_ranks

_ANSWERS = 0.3  # seconds for ranks that come just now
_LISTEN = 1.0  # seconds between two looks for a question, of a thousand ranks at most
_DISTANCE = 3  # each warning comes so many times later


class Arrivals:
    """One meeting. This rank arrives when it makes one.

    Args:
        store: store that all ranks reach.
        me: a name that all ranks know, this rank, and how many there are.
        warn_after: seconds of waiting after which this rank warns.
        has_ended: tells whether a process of this machine has ended.
        answers: ranks check the store while they wait, so that they can be asked.
    """

    def __init__(
        self,
        store: Store,
        me: tuple[str, int, int],
        warn_after: float,
        has_ended: Callable[[int], bool],
        answers: bool,
    ) -> None:
        name, self._rank, self._world = me
        self._answers, self._listened = answers, time.monotonic()
        self._store, self._place = store, _place_of(name)
        self._since, self._next = time.monotonic(), warn_after
        self._has_ended = has_ended
        self._space = process_space()
        store.set(self._process_of(self._rank), f"{os.getpid()} {self._space}")
        # Every rank comes to the meetings of a group in one order.
        self._number = store.add(f"{self._place}/{self._rank}", 1)

    def look(self) -> None:
        """Answer ranks that ask, and warn of late ranks, when it is time. One rank speaks for all
        that wait.
        """
        if time.monotonic() - self._listened >= self._pause:
            self._listened = time.monotonic()
            if self._has_been_said(self._question):
                self._say(self._awake_of(self._rank))
        if self._waited() < self._next + _ANSWERS:
            return
        self._next *= _DISTANCE
        absent = self._absent()
        speaker = next(rank for rank in range(self._world) if rank not in absent)
        if absent and speaker == self._rank:
            print(f"fastsync: {self._absent_text(absent)}", file=sys.stderr, flush=True)

    def explain(self, error: str) -> None:
        """Explain a meeting that has failed with `error`.

        Raises:
            SyncFault: names the ranks that have not come, or have ended, if there are any.
        """
        self._say(self._awake_of(self._rank))
        time.sleep(_ANSWERS)  # one that comes just now is not to blame
        rank, why = self._exit_reason()
        if why:
            description = f"{name_ranks(absent := [rank])} raised {why}"
            reason = "raised"
        elif absent := self._absent():
            description = (
                f"{self._absent_text(absent)}. Find out whether they have ended, and what they "
                "wait for; the timeout of init_process_group() says how long others wait for them"
            )
            reason = "has not come"
        elif absent := self._named_as("asleep"):
            description, reason = self._without_answer(absent)
        elif absent := self._ended():
            description = (
                f"{name_ranks(absent)} ended without a word where the model is wrapped. Look at "
                "what it printed, and in the system's log for the out-of-memory killer"
            )
            reason = "ended without a word"
        elif absent := self._asleep():
            description, reason = self._without_answer(absent)
        else:
            return
        text = f"fastsync: {description}. (The backend says: {error})"
        raise SyncFault(text, absent, seconds=self._waited(), reason=reason)

    def end(self, came: bool) -> None:
        """Do nothing: only the store counts this meeting."""

    def passed(self) -> None:
        """Say that this rank has heard of all others, and goes on."""
        self._say(self._awake_of(self._rank))

    @property
    def _pause(self) -> float:
        return _LISTEN * max(1.0, self._world / 1000)

    def _say(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone
            self._store.set(key, "")

    def _has_been_said(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def _read(self, key: str) -> str:
        """Return what is under `key`; empty where it is not written, or the
        store does not answer.
        """
        try:
            return self._store.get(key).decode() if self._has_been_said(key) else ""
        except RuntimeError:
            return ""

    def _asleep(self) -> list[int]:
        """Return ranks that came and do not say that they are awake, as the first asking rank saw
        it.

        Empty where ranks cannot answer, or the store does not.
        """
        if not self._answers:
            return []
        self._say(self._question)
        left = [rank for rank in range(self._world) if rank != self._rank]
        end = time.monotonic() + 3 * self._pause
        try:
            while left and time.monotonic() < end:
                left = [rank for rank in left if not self._store.check([self._awake_of(rank)])]
                time.sleep(_ANSWERS / 3)
            return self._name_as("asleep", left)
        except RuntimeError:
            return []

    def _without_answer(self, absent: list[int]) -> tuple[str, str]:
        have = "has" if len(absent) == 1 else "have"
        return (
            f"{name_ranks(absent)} {have} come to where models are wrapped, and {have} not answered"
            " since: stopped (SIGSTOP, SIGTSTP), frozen with the machine, or cut off from the store"
        ), "does not answer"

    def _name_as(self, what: str, ranks: list[int]) -> list[int]:
        """Return the ranks that the first asking rank has found, or `ranks` if this one is the
        first.
        """
        if not ranks:
            return []
        mine = " ".join(map(str, ranks))
        first = self._store.compare_set(f"{self._place}/{what} {self._number}", "", mine).decode()
        return [int(rank) for rank in first.split()]

    def _named_as(self, what: str) -> list[int]:
        return [int(rank) for rank in self._read(f"{self._place}/{what} {self._number}").split()]

    def _waited(self) -> float:
        return time.monotonic() - self._since

    def _absent(self) -> list[int]:
        """Empty where the store does not tell."""
        others = (rank for rank in range(self._world) if rank != self._rank)
        try:
            return [r for r in others if self._store.add(f"{self._place}/{r}", 0) < self._number]
        except RuntimeError:  # each kind of store has its own
            return []

    def _ended(self) -> list[int]:
        """Ranks of this machine that have come, and ended; as the first rank that asked saw it.

        Those that got an error because of them may have ended, too, by now.
        """
        others = (rank for rank in range(self._world) if rank != self._rank)
        try:
            told = {r: self._store.get(self._process_of(r)).decode() for r in others}
            found = [(r, *text.partition(" ")[::2]) for r, text in told.items()]
            ended = [r for r, pid, space in found if self._is_over(int(pid), space)]
            return self._name_as("ended", ended)
        except RuntimeError:
            return []

    def _is_over(self, process: int, space: str) -> bool:
        return space == self._space and self._has_ended(process)

    def _exit_reason(self) -> tuple[int, str]:
        """Return a rank that has left its exit reason, and the reason; empty if there is none."""
        rank, _, why = self._read(_exit_reason_key(self._place)).partition(" ")
        return int(rank or -1), why

    @property
    def _question(self) -> str:
        return f"{self._place}/question {self._number}"

    def _awake_of(self, rank: int) -> str:
        return f"{self._place}/{rank}/awake {self._number}"

    def _process_of(self, rank: int) -> str:
        return f"{self._place}/{rank}/process"

    def _absent_text(self, absent: list[int]) -> str:
        have = "has" if len(absent) == 1 else "have"
        return (
            f"rank {self._rank} has waited {self._waited():.1f} s for {name_ranks(absent)}, which "
            f"{have} not begun to wrap a model"
        )


class ExitReasons:
    """Exit reason that a rank leaves in the store if its script raises before the fault watch is
    open.

    Args:
        store: store that all ranks reach.
        name: name of the meeting that is to come.
        rank: this rank.
    """

    def __init__(self, store: Store, name: str, rank: int) -> None:
        self._store, self._place, self._rank = store, _exit_reason_key(_place_of(name)), rank
        self._forked = False

    def leave(self, how: str, why: str) -> None:
        """Leave the reason in the store if `how` is "raises"."""
        if how == "raises" and not self._forked:
            with contextlib.suppress(RuntimeError):  # the store may have gone before
                self._store.set(self._place, f"{self._rank} {why}")

    def wait_for_peer_exit(self, seconds: float) -> None:
        """Do nothing: this rank cannot learn how others end."""

    def close(self) -> None:
        """Do nothing: the reason is in the store."""

    def abandon(self) -> None:
        self._forked = True


def _place_of(name: str) -> str:
    return f"fastsync/{name}/arrivals"


def _exit_reason_key(place: str) -> str:
    return f"{place}/last words"
