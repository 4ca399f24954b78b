"""The search itself: from the times of steps to what is tried next, and in the end chosen.

It knows nothing of ranks or clocks. Ranks that tell it the same numbers get the same answers.

[Note: what is promised]
A step that is slower is known as such only when it is over, so no tuning can promise that each step
is as fast as the default's. This one promises, in terms of the times that it is told:
* What is tried is given up once the median of its timed steps is more than `SLOWER` above the
  best's, after the first of them at the earliest.
* Trying ends once all tried steps, and the changes of plan, together have lost more than `SLOWER`
  of what the whole window takes with the default. What comes on top is the step that oversteps
  this, and the second comparison, of something that was faster in the first.
* What is chosen was faster than the default by `GAIN` at least, when it was tried, and again when
  both were timed once more, one after the other. Otherwise the default is chosen.

[Note: one look ahead]
Sizes go by factors of two, and each of several such steps may gain less than `GAIN`, which is what
noise takes for a gain. So where a move has changed too little to tell, in either direction, it is
made once more from there before the next move's turn. Without that, a gap of a few percent that
lies three steps away is hardly ever found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Generic, TypeVar

__all__ = ["GAIN", "SLOWER", "Outcome", "Rules", "Search"]

T = TypeVar("T")
GAIN = 0.01
SLOWER = 0.02


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
    def duel(self) -> int:
        """Steps of the second comparison, of the default and the best."""
        return 2 * (1 + self.trial)


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
        self._lost = 0.0
        self._seen: list[float] = []
        self._settled = False
        self.outcome: Outcome[T] | None = None
        self._time(default, self._rules.baseline, self._after_baseline)

    def observe(self, seconds: float, spent: float) -> None:
        """One step with `current` is over.

        Args:
            seconds: it took; 0: nobody knows.
            spent: the same, and what changing to `current` took before it.
        """
        if self.outcome is not None:
            return
        self._steps += 1
        tries = self.current != self._default
        if seconds > 0:
            self._lost += spent - (self._default_seconds if tries else seconds)
        if not self._settled:
            self._settled = True
        elif seconds > 0:
            self._seen.append(seconds)
        self._judge(tries)

    def _judge(self, tries: bool) -> None:
        if self._is_complete() or (tries and self._is_hopeless()):
            self._after(median(self._seen) if self._seen else inf)
        if self.outcome is None and self._steps >= self._rules.steps:
            self._end(self._default, 0.0)

    def _time(self, what: T, count: int, after: Callable[[float], None]) -> None:
        """The next steps run with `what`; `after` is told how long they took."""
        self.current = what
        self._seen = []
        self._wanted = count
        self._settled = False
        self._after = after

    def _is_complete(self) -> bool:
        return len(self._seen) >= self._wanted

    def _is_hopeless(self) -> bool:
        slow = bool(self._seen) and median(self._seen) > (1 + SLOWER) * self._best_seconds
        return slow or (self._after == self._after_trial and self._has_overspent())

    def _has_overspent(self) -> bool:
        return self._lost > SLOWER * self._rules.steps * self._default_seconds

    def _after_baseline(self, seconds: float) -> None:
        self._default_seconds = self._best_seconds = seconds
        self._go_on()

    def _after_trial(self, seconds: float) -> None:
        whole, looks_ahead = self._is_complete(), self._from != self._best
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
        left = self._rules.steps - self._steps - self._rules.duel
        found = self._next() if left > self._rules.trial and not self._has_overspent() else None
        if found is not None:
            self._time(found, self._rules.trial, self._after_trial)
        elif self._best == self._default:
            self._end(self._default, self._default_seconds)
        else:
            self._time(self._default, self._rules.trial, self._after_default)

    def _next(self) -> T | None:
        while self._moves:
            found = self._moves[0](self._from)
            if found is not None and self._key(found) not in self._tried:
                self._tried.add(self._key(found))
                return found
            self._end_move()
        return None

    def _after_default(self, seconds: float) -> None:
        self._default_seconds = self._best_seconds = seconds
        self._time(self._best, self._rules.trial, self._after_best)

    def _after_best(self, seconds: float) -> None:
        won = self._is_complete() and seconds <= (1 - GAIN) * self._default_seconds
        self._end(*((self._best, seconds) if won else (self._default, self._default_seconds)))

    def _end(self, choice: T, seconds: float) -> None:
        self.current = choice
        known = self._default_seconds if seconds else 0.0
        self.outcome = Outcome(choice, seconds, known, self._steps)
