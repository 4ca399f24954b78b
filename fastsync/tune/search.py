"""The search itself: from the times of steps to what is tried next, and in the end chosen.

It knows nothing of ranks or clocks. Ranks that tell it the same numbers get the same answers.

[Note: what a step takes]
Other programs, late wake-ups and a network's bad moments only ever add to a step, and now and then
they double it. So what steps take with some sizes is the mean of the fastest third of them: one
disturbed step says nothing, and neither do two of seven.

[Note: what is promised]
A step that is slower is known as such only when it is over, so no tuning can promise that each step
is as fast as the default's. This one promises, in terms of what steps take:
* What is tried is given up once two of its timed steps are both more than `SLOWER` above the
  best's.
* Trying ends once all that was tried, the steps that are not timed and the changes of plan
  together have lost more than `SLOWER` of what the whole window takes with the default. What comes
  on top are the two steps after which this is seen, and one turn of the final.
* What is chosen was faster than the default by `GAIN` at least, when it was tried, and again in the
  final, where both are timed in turn until the window ends, or nothing more may be lost, or it is
  clear which is faster. Otherwise the default is chosen.

[Note: one look ahead]
Sizes go by factors of two, and each of several such steps may gain less than `GAIN`, which is what
noise takes for a gain. So where a move has changed too little to tell, in either direction, it is
made once more from there before the next move's turn. Without that, a gap of a few percent that
lies three steps away is hardly ever found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import mean
from typing import Generic, TypeVar

__all__ = ["CLEAR", "GAIN", "SLOWER", "Outcome", "Rules", "Search", "typical"]

T = TypeVar("T")
GAIN = 0.01
SLOWER = 0.02
CLEAR = 0.03  # so much faster, and a final is over


def typical(seconds: Sequence[float]) -> float:
    """What a step takes: see [Note: what a step takes]. Infinite where none was timed."""
    return mean(sorted(seconds)[: ceil(len(seconds) / 3)]) if seconds else inf


@dataclass(frozen=True)
class Rules:
    """How long is looked.

    Attributes:
        steps: in all, at most.
        trial: timed steps of each trial, after one that is not: its buffers are new.
    """

    steps: int = 50
    trial: int = 3

    @property
    def baseline(self) -> int:
        """Timed steps of the default in the beginning, which everything is compared with."""
        return 2 * self.trial - 1

    @property
    def turn(self) -> int:
        """Steps of one turn of the final: the default's and the best's."""
        return 2 * (1 + self.trial)

    @property
    def final(self) -> int:
        """Steps that are left for it when the last trial begins."""
        return max(self.turn, min(2 * self.turn, self.steps // 2))


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What was found.

    Attributes:
        choice: what to go on with.
        seconds: a step takes with it; default_seconds: with the default. 0: not known.
        steps: it took to find out.
    """

    choice: T
    seconds: float
    default_seconds: float
    steps: int


@dataclass
class _Stretch(Generic[T]):
    """Steps in a row with the same: one that is not timed, since its buffers are new, then others.

    Attributes:
        wanted: timed steps.
        after: what is called once they are over.
        first: seconds of the one that is not timed; None: it has yet to come; 0: nobody knows.
        changing: seconds of changes of plan.
    """

    what: T
    wanted: int
    after: Callable[[], None]
    first: float | None = None
    changing: float = 0.0
    timed: list[float] = field(default_factory=list)

    def add(self, seconds: float, changing: float) -> None:
        self.changing += changing
        if self.first is None:
            self.first = seconds
        elif seconds > 0:
            self.timed.append(seconds)

    @property
    def is_complete(self) -> bool:
        return len(self.timed) >= self.wanted

    def lost(self, usual: float) -> float:
        """Seconds beyond those of as many steps that take `usual`."""
        each = typical(self.timed) - usual if self.timed else 0.0
        return self.changing + (self.first - usual if self.first else 0.0) + len(self.timed) * each

    def surely_lost(self, usual: float) -> float:
        """The same, if the fastest of the steps so far is what each of them takes undisturbed."""
        fastest = min([self.first or inf, *self.timed])
        return self.changing + (1 + len(self.timed)) * (fastest - usual)


class Search(Generic[T]):
    """Follows each move from the best so far, for as long as it helps, and once beyond.

    Args:
        default: what to begin with.
        moves: from one thing to another to try, or None where there is none.
        key: equal for what comes to the same, which is tried once.

    Attributes:
        current: what the next step is to run with.
        outcome: once the search has ended; `current` is what was chosen then.
    """

    def __init__(
        self,
        default: T,
        moves: Sequence[Callable[[T], T | None]],
        key: Callable[[T], Hashable],
        rules: Rules = Rules(),
    ) -> None:
        self._default = self._best = self._from = self.current = default
        self._default_seconds = self._best_seconds = 0.0
        self._moves = list(moves)
        self._key = key
        self._rules = rules
        self._tried = {key(default)}
        self._steps = 0
        self._lost = 0.0  # in stretches that are over
        self._final: tuple[list[float], list[float]] = ([], [])  # the default's steps, the best's
        self.outcome: Outcome[T] | None = None
        self._run(default, self._after_baseline, rules.baseline)

    def observe(self, seconds: float, spent: float) -> None:
        """One step with `current` is over.

        Args:
            seconds: it took; 0: nobody knows.
            spent: the same, and what changing to `current` took before it.
        """
        if self.outcome is not None:
            return
        self._steps += 1
        self._stretch.add(seconds, spent - seconds)
        if self._stretch.is_complete or self._is_hopeless():
            if self._default_seconds:
                self._lost += self._stretch.lost(self._default_seconds)
            self._stretch.after()
        if self.outcome is None and self._steps >= self._rules.steps:
            self._decide()

    def _run(self, what: T, after: Callable[[], None], wanted: int = 0) -> None:
        """The next steps run with `what`."""
        self.current = what
        self._stretch = _Stretch(what, wanted or self._rules.trial, after)

    def _is_hopeless(self) -> bool:
        stretch = self._stretch
        if stretch.after != self._after_trial:
            return False
        timed = stretch.timed
        slow = len(timed) > 1 and min(timed) > (1 + SLOWER) * self._best_seconds
        return slow or (
            bool(timed) and self._has_overspent(stretch.surely_lost(self._default_seconds))
        )

    def _has_overspent(self, more: float = 0.0) -> bool:
        return self._lost + more > SLOWER * self._rules.steps * self._default_seconds

    def _after_baseline(self) -> None:
        self._default_seconds = self._best_seconds = typical(self._stretch.timed)
        self._go_on()

    def _after_trial(self) -> None:
        whole, looks_ahead = self._stretch.is_complete, self._from != self._best
        seconds = typical(self._stretch.timed)
        if whole and seconds <= (1 - GAIN) * self._best_seconds:
            self._best, self._best_seconds = self.current, seconds
            self._from = self._best
        elif whole and seconds < (1 + GAIN) * self._best_seconds and not looks_ahead:
            self._from = self.current  # see [Note: one look ahead]
        else:
            self._end_move()
        self._go_on()

    def _end_move(self) -> None:
        self._moves.pop(0)
        self._from = self._best

    def _go_on(self) -> None:
        left = self._rules.steps - self._steps - self._rules.final
        found = self._next() if left > self._rules.trial and not self._has_overspent() else None
        if found is not None:
            self._run(found, self._after_trial)
        elif self._best == self._default:
            self._end(self._default, self._default_seconds, self._default_seconds)
        else:
            self._run(self._default, self._after_default)

    def _next(self) -> T | None:
        while self._moves:
            found = self._moves[0](self._from)
            if found is not None and self._key(found) not in self._tried:
                self._tried.add(self._key(found))
                return found
            self._end_move()
        return None

    def _after_default(self) -> None:
        self._final[0].extend(self._stretch.timed)
        self._run(self._best, self._after_best)

    def _after_best(self) -> None:
        self._final[1].extend(self._stretch.timed)
        default, best = map(typical, self._final)
        is_clear = best <= (1 - CLEAR) * default or best > (1 + GAIN) * default
        has_room = self._rules.steps - self._steps >= self._rules.turn
        if has_room and not is_clear and not self._has_overspent():
            self._run(self._default, self._after_default)
        else:
            self._decide()

    def _decide(self) -> None:
        """By the turns of the final that are over; the default where there were none."""
        default, best = map(typical, self._final)
        if best == inf:
            self._end(self._default, 0.0, 0.0)
        elif best <= (1 - GAIN) * default:
            self._end(self._best, best, default)
        else:
            self._end(self._default, default, default)

    def _end(self, choice: T, seconds: float, default: float) -> None:
        self.current = choice
        self.outcome = Outcome(choice, seconds, default, self._steps)
