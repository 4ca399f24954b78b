"""Who has come to the first meeting of a group, as the rendezvous store knows it.

Until this meeting is over no rank looks out for others. Who waits for a rank that does not come
can still say which one it is.
"""

from __future__ import annotations

import sys
import time

from fastsync.ranks.faults import SyncFault
from fastsync.ranks.words import name_ranks
from fastsync.torch_private import Store

__all__ = ["Arrivals"]

_ANSWERS = 0.3  # seconds for ranks that come just now
_DISTANCE = 3  # each warning comes so many times later


class Arrivals:
    """One meeting. This rank arrives when it makes one.

    Args:
        store: that all ranks reach.
        me: a name that all ranks know, this rank, and how many there are.
        warn_after: seconds of waiting.
    """

    def __init__(self, store: Store, me: tuple[str, int, int], warn_after: float) -> None:
        name, self._rank, self._world = me
        self._store, self._place = store, f"fastsync/{name}/arrivals"
        self._since, self._next = time.monotonic(), warn_after
        # Every rank comes to the meetings of a group in one order.
        self._number = store.add(f"{self._place}/{self._rank}", 1)

    def look(self) -> None:
        """Warns of ranks that are late, when it is time. One rank speaks for all that wait."""
        if self._waited() < self._next + _ANSWERS:
            return
        self._next *= _DISTANCE
        absent = self._absent()
        speaker = next(rank for rank in range(self._world) if rank not in absent)
        if absent and speaker == self._rank:
            print(f"fastsync: {self._words(absent)}", file=sys.stderr, flush=True)

    def explain(self, error: str) -> None:
        """The meeting has failed with `error`.

        Raises:
            SyncFault: names the ranks that have not come, if there are any.
        """
        if absent := self._absent():
            raise SyncFault(
                f"fastsync: {self._words(absent)}. Find out whether they have ended, and what they "
                "wait for; the timeout of init_process_group() says how long others wait for them. "
                f"(The backend says: {error})",
                absent,
                seconds=self._waited(),
                reason="has not come",
            )

    def end(self, came: bool) -> None:
        """Nobody counts this meeting but the store."""

    def _waited(self) -> float:
        return time.monotonic() - self._since

    def _absent(self) -> list[int]:
        """Empty where the store does not tell."""
        others = (rank for rank in range(self._world) if rank != self._rank)
        try:
            return [r for r in others if self._store.add(f"{self._place}/{r}", 0) < self._number]
        except RuntimeError:  # each kind of store has its own
            return []

    def _words(self, absent: list[int]) -> str:
        have = "has" if len(absent) == 1 else "have"
        return (
            f"rank {self._rank} has waited {self._waited():.1f} s for {name_ranks(absent)}, which "
            f"{have} not begun to wrap a model"
        )
