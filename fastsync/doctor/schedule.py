"""Which pairs of ranks are measured, and which of them at the same time.

Few ranks: all pairs, one after another, so that none disturbs another. Many: each rank with those
1, 2, 4, ... places on, which are the ring and the hops of tree algorithms; pairs that have no rank
in common are measured together, so that the number of rounds grows with the logarithm alone.
"""

from __future__ import annotations

from itertools import combinations

__all__ = ["ALL_PAIRS", "Pair", "Round", "pair_rounds", "partner"]

ALL_PAIRS = 16  # ranks up to which all pairs are measured
Pair = tuple[int, int]
Round = tuple[Pair, ...]


def pair_rounds(world: int, all_pairs: int = ALL_PAIRS) -> list[Round]:
    """Rounds of pairs (a, b) with a < b that have no rank in common; each pair occurs once."""
    if world <= all_pairs:
        return [(pair,) for pair in combinations(range(world), 2)]
    rounds: list[Round] = []
    seen: set[Pair] = set()
    for distance in _distances(world):
        pairs = {_ordered(rank, (rank + distance) % world) for rank in range(world)}
        rounds += _disjoint(sorted(pairs - seen))
        seen |= pairs
    return rounds


def partner(pairs: Round, rank: int) -> int | None:
    """Whom `rank` is measured with in a round."""
    for a, b in pairs:
        if rank in (a, b):
            return a + b - rank
    return None


def _distances(world: int) -> list[int]:
    """Of the ring, and the powers of two up to half way around it."""
    return [1 << power for power in range(world.bit_length()) if 1 << power <= world // 2]


def _ordered(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def _disjoint(pairs: list[Pair]) -> list[Round]:
    """Few rounds: each takes what does not touch a rank that it has."""
    rounds: list[Round] = []
    while pairs:
        busy: set[int] = set()
        taken: list[Pair] = []
        for pair in pairs:
            if busy.isdisjoint(pair):
                busy.update(pair)
                taken.append(pair)
        rounds.append(tuple(taken))
        done = set(taken)
        pairs = [pair for pair in pairs if pair not in done]
    return rounds
