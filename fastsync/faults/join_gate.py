"""Door through which ranks that come back or join are admitted to a training, in the store.

All keys lie in one place of the store, and each waiting rank makes an announcement with a number of
its own. While it waits it counts a number up, which shows that it is alive: the ranks that train
would wait for a dead one when they connect.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fastsync._torch import Store
from fastsync.faults.sync_fault import SyncFault

ENDED = "ended"  # set by the launcher once a rank has come to its end
_BEAT = 0.05  # seconds between two signs of life
_LOOK = 0.2  # seconds between two looks for ranks that wait
_TRAINING = "training"


def back_key(attempt: int) -> str:
    """Set once a process that the launcher has started after the others trains."""
    return f"back/{attempt}"


@dataclass
class _Sign:
    """Knowledge of a training rank about an announcement.

    Attributes:
        rank: the rank that announced itself.
        beat: how far it had counted at the last look; -1: there was none.
        lives: it has counted on since then.
    """

    rank: int
    beat: int = -1
    lives: bool = False


@dataclass
class JoinGate:
    """View of a training rank on the ranks that wait.

    Args:
        store: the place of the training in the store, which has no other user.
    """

    store: Store
    _seen: int = 0
    _signs: dict[int, _Sign] = field(default_factory=dict)  # by announcement
    _next_look: float = 0.0

    def describe(self, training: str) -> None:
        """Tell ranks that come back what they need to know. The first rank that does is heard."""
        self.store.compare_set(_TRAINING, "", training)

    def somebody_waits(self, present: Collection[int]) -> bool:
        """Return whether a rank that is not `present` waits. Ask the store once in a while.

        Raises:
            RuntimeError: the store has gone.
        """
        now = time.monotonic()
        if now >= self._next_look:
            before = self._seen
            self._look()  # and soon again, where somebody new may be alive
            self._next_look = now + (_LOOK if self._seen == before else 2 * _BEAT)
        return bool(self.waiting(present))

    def waiting(self, present: Collection[int]) -> Mapping[int, int]:
        """Each rank that is not `present` and was alive at the last look, with its announcement."""
        signs = sorted(self._signs.items())
        return {s.rank: n for n, s in signs if s.lives and s.rank not in present}

    def admit(self, joining: Mapping[int, int], epoch: int) -> None:
        """Tell them that they are members of an epoch. They are tried once."""
        for number in joining.values():
            self.store.set(f"admitted/{number}", str(epoch))
            self._signs.pop(number, None)

    def _look(self) -> None:
        store = self.store
        announced = store.add("announced", 0)
        for number in range(self._seen + 1, announced + 1):
            if not store.check([f"rank/{number}"]):
                return  # it is about to say which rank it is
            self._seen = number
            self._signs[number] = _Sign(int(store.get(f"rank/{number}")))
        for number, sign in list(self._signs.items()):
            beat = store.add(f"beat/{number}", 0)
            sign.lives, sign.beat = 0 <= sign.beat < beat, beat
            if store.check([f"admitted/{number}"]):
                del self._signs[number]


@dataclass
class Waiting:
    """A rank that comes back or joins, before those that train have taken it in.

    Args:
        store: the place of the training.
        rank: which it is.
        timeout: seconds.
    """

    store: Store
    rank: int
    timeout: float

    def training(self) -> str:
        """Return the description of the training by the ranks that train.

        Raises:
            SyncFault: they give none in time.
        """
        self._wait_for(_TRAINING)
        return self.store.get(_TRAINING).decode()

    def admitted(self) -> int:
        """Return the epoch that this rank is a member of, once the training ranks have decided on
        it.

        Raises:
            SyncFault: they do not.
        """
        number = self.store.add("announced", 1)
        self.store.set(f"rank/{number}", str(self.rank))
        self._wait_for(f"admitted/{number}", f"beat/{number}")
        return int(self.store.get(f"admitted/{number}"))

    def _wait_for(self, key: str, beat: str = "beat/0") -> None:
        deadline = time.monotonic() + self.timeout
        while not self.store.check([key]):
            if self.store.check([ENDED]):
                raise SyncFault(
                    f"fastsync: the training has ended before it had taken rank {self.rank} in"
                )
            if time.monotonic() > deadline:
                raise SyncFault(
                    f"fastsync: rank {self.rank} was started, and waited {self.timeout:g} s, but "
                    "the ranks that train did not take it in. They do so before a forward that "
                    "follows a step of an optimizer, if every rank has called catch_up()"
                )
            self.store.add(beat, 1)
            time.sleep(_BEAT)
