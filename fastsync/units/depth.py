"""How many units ahead to gather, so that each arrives in time if it can. Pure arithmetic.

One gather at a time travels, in the order in which they began. A unit computes when the one before
it has, and its own gather has arrived. Where small units follow one that computes for long, the
link would idle, then make each of them wait: it can bring several while the long one computes. Of
equal units on a slow link one is always under way, and more make no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Stop", "depths", "length", "limit_of"]

# Of the time of all units: what must be gained so that more than one is gathered ahead.
WORTH = 0.02


@dataclass(frozen=True)
class Stop:
    """A unit at its place in the order of a forward, or of a backward.

    Attributes:
        compute: seconds from when it is there until the next one is wanted.
        gather: seconds that it travels by itself; 0 for one that need not.
        nbytes: that it takes from the beginning of its gather until its turn is over.
        besides: bytes that are held while it computes, such as gradients.
    """

    compute: float
    gather: float
    nbytes: int
    besides: int = 0


def depths(stops: Sequence[Stop], limit: int) -> tuple[int, ...]:
    """For each place, up to how many units ahead gathers have begun when its unit computes.

    Args:
        limit: bytes that more than one unit ahead may fill, with what is held besides.
    """
    if not stops:
        return ()
    after = [min(at + 1, len(stops) - 1) for at in range(len(stops))]
    begun = _within(stops, _wanted(stops), limit)
    if length(stops, begun) > (1 - WORTH) * length(stops, after):
        begun = after
    return tuple(last - at for at, last in enumerate(begun))


def limit_of(stops: Sequence[Stop]) -> int:
    """The most bytes that one unit ahead takes at any place."""
    ahead = [*(stop.nbytes for stop in stops[1:]), 0]
    return max(
        (s.nbytes + s.besides + more for s, more in zip(stops, ahead, strict=False)), default=0
    )


def length(stops: Sequence[Stop], begun: Sequence[int]) -> float:
    """Seconds from when the first unit is there to the end of the last one.

    Args:
        begun: by place, the last unit whose gather has begun when that one's computes.
    """
    return _begins(stops, begun)[-1] + stops[-1].compute


def _begins(stops: Sequence[Stop], begun: Sequence[int]) -> list[float]:
    """When each unit computes."""
    begins, link = [0.0], 0.0
    at = 0  # whose beginning lets the gather begin
    for number in range(1, len(stops)):
        while begun[at] < number:
            at += 1
        ready = begins[-1] + stops[number - 1].compute
        if stops[number].gather > 0:
            link = max(link, begins[at]) + stops[number].gather
            ready = max(ready, link)
        begins.append(ready)
    return begins


def _wanted(stops: Sequence[Stop]) -> list[int]:
    """By place, the last unit whose gather must have begun there: as late as no time is lost."""
    count = len(stops)
    begins = _begins(stops, [count - 1] * count)
    slack = WORTH * (begins[-1] + stops[-1].compute) / count
    begun = [min(at + 1, count - 1) for at in range(count)]
    latest = float("inf")
    place = count - 1
    for number in range(count - 1, 0, -1):
        latest = min(latest, begins[number]) - stops[number].gather
        place = min(place, number - 1)
        while place > 0 and begins[place] > latest + slack:
            place -= 1
        begun[place] = max(begun[place], number)
    return list(accumulate(begun, max))


def _within(stops: Sequence[Stop], wanted: Sequence[int], limit: int) -> list[int]:
    """Return the wanted depths, as far as memory goes. One ahead always fits."""
    begun: list[int] = []
    last = 0
    for at in range(len(stops)):
        last = max(last, min(at + 1, len(stops) - 1))
        while last < wanted[at] and _fits(stops, at, last + 1, limit):
            last += 1
        begun.append(last)
    return begun


def _fits(stops: Sequence[Stop], at: int, last: int, limit: int) -> bool:
    """Return whether units up to `last` may be there from this place on, until
    their turn is next.
    """
    held = sum(stop.nbytes for stop in stops[at : last + 1])
    for stop in stops[at : last - 1]:
        if held + stop.besides > limit:
            return False
        held -= stop.nbytes
    return True
