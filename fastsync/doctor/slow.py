"""Which pairs and which ranks are slow beside the others: pure rules, stated in `RULES`.

[Note: a rank before its pairs]
A rank whose link is slow makes all of its pairs slow: two of three pairs among three ranks, so that
the median pair would be a slow one. So ranks are compared first, each by its best pair. Pairs of
ranks that are slow themselves are left out when pairs are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import TypeVar

from fastsync.doctor.finding import Finding, ok, warn
from fastsync.doctor.schedule import Pair
from fastsync.ranks.words import name_ranks

__all__ = ["RULES", "PairTime", "Slow", "check_compute", "check_pairs", "find_slow", "suspects"]

_RATE = 0.5  # of the median
_LATENCY = 3.0  # times the median
# Seconds by which a latency must exceed it too: on a machine with more threads than cores they wait
# for each other that long.
_NOISE_WITHIN, _NOISE_BETWEEN = 2e-3, 2e-4
_COMPUTE = 1.3  # times the median
_FEWEST = 3  # ranks, or pairs, that can be compared
RULES = (
    f"A pair is slow if its rate is below {_RATE:g} of the median, or its latency above "
    f"{_LATENCY:g} times the median, and above it by {1e3 * _NOISE_BETWEEN:g} ms "
    f"({1e3 * _NOISE_WITHIN:g} ms within a machine). A rank is slow if that holds for "
    f"its best pair, or if its matrix product takes {_COMPUTE:g} times the median. Pairs within a "
    f"machine and between machines are compared apart, {_FEWEST} of them at least."
)
Key = TypeVar("Key", int, Pair)


@dataclass(frozen=True)
class PairTime:
    """Exchanges between two ranks, both directions at once: the best of several.

    Attributes:
        latency: seconds for 8 bytes.
        rate: bytes per second, in each direction.
    """

    latency: float
    rate: float


@dataclass(frozen=True)
class Slow:
    """What is slow beside the median: pairs of ranks that are slow are not listed."""

    ranks: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()


def find_slow(times: Mapping[Pair, PairTime], machine_of: Sequence[int]) -> Slow:
    """Compares pairs within machines with each other, and pairs between machines.

    Args:
        machine_of: by rank, equal on those that share a machine.
    """
    within = {p: t for p, t in times.items() if machine_of[p[0]] == machine_of[p[1]]}
    between = {p: t for p, t in times.items() if p not in within}
    found = [_of_class(within, _NOISE_WITHIN), _of_class(between, _NOISE_BETWEEN)]
    ranks = tuple(sorted({rank for slow in found for rank in slow.ranks}))
    return Slow(ranks, tuple(sorted(pair for slow in found for pair in slow.pairs)))


def _of_class(times: Mapping[Pair, PairTime], noise: float) -> Slow:
    ranks = _outliers(_best_of_ranks(times), noise)
    rest = {p: t for p, t in times.items() if not ranks.intersection(p)}
    return Slow(tuple(sorted(ranks)), tuple(sorted(_outliers(rest, noise))))


def _best_of_ranks(times: Mapping[Pair, PairTime]) -> dict[int, PairTime]:
    best: dict[int, PairTime] = {}
    for pair, time in times.items():
        for rank in pair:
            it = best.get(rank, time)
            best[rank] = PairTime(min(it.latency, time.latency), max(it.rate, time.rate))
    return best


def _outliers(times: Mapping[Key, PairTime], noise: float) -> set[Key]:
    if len(times) < _FEWEST:
        return set()
    rate = median_high(time.rate for time in times.values())
    latency = median_low(time.latency for time in times.values())
    return {key for key, time in times.items() if _is_slow(time, PairTime(latency, rate), noise)}


def _is_slow(time: PairTime, usual: PairTime, noise: float) -> bool:
    late = time.latency > max(_LATENCY * usual.latency, usual.latency + noise)
    return late or time.rate < _RATE * usual.rate


def suspects(times: Mapping[Pair, PairTime], slow: Slow) -> list[Pair]:
    """The pairs that may be slow: marked themselves, or by a rank of theirs."""
    marked = set(slow.ranks)
    return [p for p in sorted(times) if p in slow.pairs or not marked.isdisjoint(p)]


def check_pairs(slow: Slow, measured: int) -> list[Finding]:
    """What `find_slow` has found, of so many pairs."""
    found = []
    if slow.ranks:
        text = f"{name_ranks(slow.ranks)}: every pair is slow beside the others"
        remedy = "Look at that machine's cable, switch port, interface speed and load"
        found.append(warn("links", text, remedy))
    if slow.pairs:
        text = f"slow beside the others: {_named(slow.pairs)}"
        remedy = "Look at the switches between their machines; place ranks that talk close by"
        found.append(warn("links", text, remedy))
    alone = "one pair, which nothing can be compared with"
    return found or [ok("links", f"no slow pair among {measured}" if measured > 1 else alone)]


def _named(pairs: Iterable[Pair], most: int = 8) -> str:
    names = [f"{a}-{b}" for a, b in pairs]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def check_compute(seconds: Sequence[float]) -> list[Finding]:
    """By rank, what the same matrix product takes.

    With two ranks the faster one is the measure.
    """
    if len(seconds) < 2:
        return []
    usual = median_low(seconds)
    slow = [rank for rank, it in enumerate(seconds) if it > _COMPUTE * usual]
    if not slow:
        spread = max(seconds) / min(seconds)
        return [ok("compute", f"the slowest rank takes {spread:.2f} times as long as the fastest")]
    factor = max(seconds) / usual
    text = f"the others compute up to {factor:.1f} times as fast as {name_ranks(slow)}"
    remedy = "All wait for the slowest: look at its clock, temperature, other load and cores"
    return [warn("compute", text, remedy)]
