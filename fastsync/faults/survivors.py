"""Meetings of the survivors of a death: through the rendezvous store, one epoch after the other.

Each survivor says which steps it has finished. The lowest rank that is not known to be dead decides
for all, once all survivors have spoken. It decides by compare-and-set, so that the first decision
holds. A later death leads to the next epoch, which each rank reaches by itself.

Ranks are counted here as they were when the training began.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from fastsync._torch import Store
from fastsync.faults.sync_fault import SyncFault

_PAUSE = 0.002  # seconds between looks at the store
_LONGEST = 1800.0


@dataclass(frozen=True)
class RankState:
    """Progress of one rank.

    Attributes:
        steps: that it has finished.
        complete: it has all averages of the next one, too, and does not know whether others have.
        between: it is between two steps: its optimizer has made what belongs to the last one.
    """

    steps: int
    complete: bool
    between: bool = False


@dataclass(frozen=True)
class Decision:
    """Decision on what the survivors of an epoch do, the same on all of them.

    Attributes:
        ranks: the survivors.
        steps: steps that all of them have finished when they go on.
        takes: ranks that have finished fewer steps use the averages that they have.
        joining: ranks that come back, each with the number of its announcement.
    """

    ranks: tuple[int, ...]
    steps: int
    takes: bool
    joining: tuple[tuple[int, int], ...] = ()

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks that have been there before."""
        back = dict(self.joining)
        return tuple(rank for rank in self.ranks if rank not in back)

    @classmethod
    def of(cls, text: bytes) -> Decision:
        """Decode a decision from the store."""
        stated = json.loads(text)
        back = tuple((rank, number) for rank, number in stated["joining"])
        return cls(tuple(stated["ranks"]), stated["steps"], stated["takes"], back)


def decide(states: Mapping[int, RankState], waiting: Mapping[int, int] | None = None) -> Decision:
    """Return the decision that follows from the steps of the survivors.

    A rank finishes a step only when it knows that every rank has all its averages. So if a rank
    that has the fewest steps lacks any, no rank has finished the step, and all average it again. If
    none lacks any, some rank, perhaps a dead one, may have finished it.

    Ranks that come back receive the others' state between two steps. So they wait while any rank
    has not got there yet.

    Args:
        states: by rank.
        waiting: ranks that have come back, and the numbers of their announcements.

    Raises:
        SyncFault: they cannot be reached by ranks that agree.
    """
    steps = min(at.steps for at in states.values())
    takes = all(at.complete for at in states.values() if at.steps == steps)
    after = steps + 1 if takes else steps
    ahead = [rank for rank, at in states.items() if at.steps > after]
    if ahead:
        raise SyncFault(
            f"fastsync: ranks {ahead} have finished step {after + 1}, for which others lack "
            "averages: the ranks do not agree. Restart from a checkpoint"
        )
    admits = all(at.between for at in states.values())
    back = {rank: n for rank, n in (waiting or {}).items() if admits and rank not in states}
    return Decision(tuple(sorted({*states, *back})), after, takes, tuple(sorted(back.items())))


@dataclass(frozen=True)
class Patience:
    """How long ranks wait for those that are slow.

    Attributes:
        least: with fewer ranks they wait on.
    """

    seconds: float
    least: int


class Survivors:
    """Place where the survivors meet.

    Args:
        store: that all ranks reach.
        name: of the place; equal on all ranks.
        rank: this one.
        opened: the place's `name`, where the others have opened it before; empty: they do now.

    Attributes:
        name: equal on all ranks, and no other place's.
        waiting: asked by the rank that decides: ranks that have come back, and the numbers of their
            announcements.
    """

    def __init__(self, store: Store, name: str, rank: int, opened: str = "") -> None:
        self._store, self._rank = store, rank
        base = f"fastsync/{name}"
        # Ranks open their places in one order, two of one name too.
        self.name = opened or f"{base}-{store.add(f'{base}/{rank}', 1)}"
        self.waiting: Callable[[], Mapping[int, int]] = dict

    def meet(
        self,
        epoch: int,
        ranks: Sequence[int],
        mine: RankState,
        dead: Callable[[], Collection[int]],
        timeout: float = _LONGEST,
        patience: Patience | None = None,
    ) -> Decision:
        """Return the decision on which ranks go on, and with which step, once it has been made. It
        may leave this rank out, where it has come too late.

        Args:
            epoch: a number that no meeting of these ranks has had.
            ranks: those of the epoch before.
            dead: which of them have ended, asked again and again.
            timeout: seconds that a rank waits for the others.
            patience: after which a decision leaves out ranks that have not come; None: it does not.

        Raises:
            SyncFault: the store has gone, or a rank neither comes nor ends.
        """
        place = f"{self.name}/{epoch}"
        try:
            self._store.set(f"{place}/{self._rank}", json.dumps(asdict(mine)))
            return self._decision(place, ranks, dead, timeout, patience)
        except SyncFault:
            raise
        except RuntimeError as error:  # each kind of store has its own
            raise SyncFault(_store_gone(self._rank, error)) from error

    def gather(
        self,
        place: str,
        ranks: Sequence[int],
        dead: Callable[[], Collection[int]],
        patience: Patience | None = None,
    ) -> bool:
        """Return whether all of `ranks` have come, the same on all of them; not, if one ends
        before, or comes too late.

        Args:
            place: that they have not met at before.
        """
        store, place = self._store, f"{self.name}/{place}"
        outcome, began = f"{place}/outcome", time.monotonic()
        speaks = store.add(place, 1) == 1  # for all: the first to come
        while not store.check([outcome]):
            came = store.add(place, 0)
            if came >= len(ranks):
                store.compare_set(outcome, "", "all")
            elif any(rank in dead() for rank in ranks) or _is_over(patience, began, came):
                store.compare_set(outcome, "", "not all")
            else:
                if speaks and patience is not None and came < patience.least:
                    speaks = not self._warn_of_few(patience, began, f"{came} of {len(ranks)}")
                time.sleep(_PAUSE)
        return store.get(outcome) == b"all"

    def _warn_of_few(self, patience: Patience, began: float, came: str) -> bool:
        """Warn that ranks that have met since `began` are too few, if they have waited so long.

        Returns:
            Whether it has.
        """
        if time.monotonic() < began + patience.seconds:
            return False
        warnings.warn(
            f"fastsync: rank {self._rank} has waited {patience.seconds:g} s for the other ranks to "
            f"average, and {came} have come: fewer than min_ranks={patience.least}, so that these "
            "do not go on alone. Look at what the others do",
            stacklevel=2,
        )
        return True

    def forget(self, place: str) -> None:
        """Delete what the store holds of a place that all have left."""
        for key in (place, f"{place}/outcome"):
            self._store.delete_key(f"{self.name}/{key}")

    def decided(self, epoch: int) -> Decision:
        """Return what an epoch has decided, for a rank that has not been there."""
        return Decision.of(self._store.get(f"{self.name}/{epoch}/decision"))

    def _decision(
        self,
        place: str,
        ranks: Sequence[int],
        dead: Callable[[], Collection[int]],
        timeout: float,
        patience: Patience | None,
    ) -> Decision:
        store, decided, began = self._store, f"{place}/decision", time.monotonic()
        while not store.check([decided]):
            gone = dead()
            present = [r for r in ranks if r == self._rank or r not in gone]
            absent = [r for r in present if not store.check([f"{place}/{r}"])]
            came = [rank for rank in present if rank not in absent]
            over = not absent or (patience is not None and _is_over(patience, began, len(came)))
            if over and came[0] == self._rank:
                stated = {r: json.loads(store.get(f"{place}/{r}")) for r in came}
                states = {r: RankState(**at) for r, at in stated.items()}
                decision = decide(states, self.waiting())
                store.compare_set(decided, "", json.dumps(asdict(decision)))
                break
            if time.monotonic() > began + timeout:
                raise SyncFault(
                    f"fastsync: rank {self._rank} waited for ranks {absent} after others had died, "
                    "but they did not come. Restart from a checkpoint",
                    absent,
                )
            time.sleep(_PAUSE)
        return Decision.of(store.get(decided))


def _is_over(patience: Patience | None, began: float, came: int) -> bool:
    """Return whether ranks that have met since `began` wait no longer for the others."""
    waited = time.monotonic() - began
    return waited > _LONGEST or (
        patience is not None and waited > patience.seconds and came >= patience.least
    )


def _store_gone(rank: int, error: Exception) -> str:
    return (
        f"fastsync: other ranks have died, and rank {rank} cannot meet the survivors: the "
        "rendezvous store has gone with them. Restart from a checkpoint, with `python -m "
        f"fastsync.elastic`, whose store outlives all but the first machine. ({error})"
    )
