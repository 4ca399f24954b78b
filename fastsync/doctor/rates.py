"""Measure the process group and its devices, and find what is slow beside the others.

Collective: all ranks take every step together. Whether another round is made follows from numbers
that all ranks have from a collective.

[Note: pairs]
Few ranks: all pairs, one after another, so that none disturbs another. Many: each rank with those
1, 2, 4, ... places on, which are the ring and the hops of tree algorithms; pairs that have no rank
in common are measured together, so that the number of rounds grows with the logarithm alone.

A rank whose link is slow makes all of its pairs slow: two of three pairs among three ranks, so that
the median pair would be a slow one. So ranks are compared first, each by its best pair. Pairs of
ranks that are slow themselves are left out when pairs are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median, median_high, median_low
from typing import TypeVar

import torch
import torch.distributed as dist

from fastsync._torch import default_group, gather_objects
from fastsync.doctor.finding import Finding, ok, warn
from fastsync.faults.wording import name_ranks

_SIZES = (1 << 17, 1 << 20, 1 << 23, 1 << 26)  # bytes of all-reduces
_ROUNDS = 10  # of each
_LATENCIES, _RATES = 20, 5  # exchanges of a pair
_PAIR_SECONDS = 0.01  # that an exchange may take, for its size
_PAIR_BYTES = (1 << 16, 1 << 22)
_SIDE = {"cpu": 512, "cuda": 4096}
_ALL_PAIRS = 16  # ranks up to which all pairs are measured
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
Pair = tuple[int, int]
Round = tuple[Pair, ...]
Key = TypeVar("Key", int, Pair)


@dataclass(frozen=True)
class AllReduce:
    """All-reduces of all ranks.

    Attributes:
        nbytes: of each rank's buffer.
        seconds: the median of the slowest rank.
        rate: bus bandwidth as nccl-tests define it, 2 (N-1)/N bytes over seconds: what each
            rank's link carries, in bytes per second.
    """

    nbytes: int
    seconds: float
    rate: float


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
class Pairs:
    """Exchanges of pairs: the best of several, since threads that wake late are no fault of a link.

    Attributes:
        times: of pairs (a, b) with a < b, by the slower of both ranks.
        planned: pairs that would have been measured, had there been time.
    """

    times: Mapping[Pair, PairTime]
    planned: int


@dataclass(frozen=True)
class Slow:
    """Ranks and pairs that are slow beside the median; pairs of slow ranks are not listed."""

    ranks: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Everything that was measured."""

    all_reduce: AllReduce
    pairs: Pairs
    slow: Slow


def _timed(run: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the largest of all ranks'; the same number on each."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def measure_all_reduce(device: torch.device, budget: float) -> AllReduce:
    """Time all-reduces of the largest size that `budget` seconds allow."""
    for nbytes in _SIZES:
        run = partial(dist.all_reduce, torch.zeros(nbytes // 4, device=device))
        _timed(run, device)
        seconds = _slowest(median(_timed(run, device) for _ in range(_ROUNDS)), device)
        if seconds * (_ROUNDS + 1) * _SIZES[1] / _SIZES[0] > budget:
            break
    world = dist.get_world_size()
    return AllReduce(nbytes, seconds, 2 * (world - 1) / world * nbytes / seconds)


def pair_rounds(world: int) -> list[Round]:
    """Return rounds of pairs (a, b), a < b, without a common rank; each pair occurs once."""
    if world <= _ALL_PAIRS:
        return [(pair,) for pair in combinations(range(world), 2)]
    rounds: list[Round] = []
    seen: set[Pair] = set()
    for distance in (1 << power for power in range((world // 2).bit_length())):
        ends = ((rank, (rank + distance) % world) for rank in range(world))
        left = sorted({(min(pair), max(pair)) for pair in ends} - seen)
        seen.update(left)
        while left:  # few rounds: each takes what does not touch a rank that it has
            busy: set[int] = set()
            taken: list[Pair] = []
            for pair in left:
                if busy.isdisjoint(pair):
                    busy.update(pair)
                    taken.append(pair)
            rounds.append(tuple(taken))
            left = [pair for pair in left if pair not in set(taken)]
    return rounds


def measure_pairs(
    device: torch.device, budget: float, rate: float, say: Callable[[str], None]
) -> Pairs:
    """Measure latency and rate of pairs of ranks.

    Args:
        budget: seconds; pairs that find none left are not measured.
        rate: bytes per second that links are thought to have, alike on all ranks.
        say: tells the user how far it is.
    """
    rounds, rank = pair_rounds(dist.get_world_size()), dist.get_rank()
    # A power of two that travels in about `_PAIR_SECONDS`.
    wanted = max(int(rate * _PAIR_SECONDS), 1)
    nbytes = min(max(1 << (wanted.bit_length() - 1), _PAIR_BYTES[0]), _PAIR_BYTES[1])
    mine: dict[Pair, PairTime] = {}
    spent = longest = 0.0
    for number, pairs in enumerate(rounds):
        if spent + longest > budget:
            break
        if number and number % max(1, len(rounds) // 5) == 0:
            say(f"pairs: {number} of {len(rounds)} rounds")
        begun = time.perf_counter()
        for pair in pairs:
            if rank in pair:
                mine[pair] = _exchanges(sum(pair) - rank, nbytes, device)
        took = _slowest(time.perf_counter() - begun, device)
        spent, longest = spent + took, max(longest, took)
    slower: dict[Pair, PairTime] = {}
    for its in gather_objects(mine, default_group()):
        for pair, it in its.items():
            other = slower.get(pair, it)
            slower[pair] = PairTime(max(other.latency, it.latency), min(other.rate, it.rate))
    return Pairs(dict(sorted(slower.items())), sum(map(len, rounds)))


def _exchanges(peer: int, nbytes: int, device: torch.device) -> PairTime:
    tiny = [_exchange_seconds(peer, 8, device) for _ in range(_LATENCIES + 2)][2:]
    large = [_exchange_seconds(peer, nbytes, device) for _ in range(_RATES + 1)][1:]
    return PairTime(min(tiny), nbytes / min(large))


def _exchange_seconds(peer: int, nbytes: int, device: torch.device) -> float:
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return _timed(exchange, device)


def find_slow(times: Mapping[Pair, PairTime], machines: Sequence[Sequence[int]]) -> Slow:
    """Compare pairs within machines with each other, and pairs between machines.

    Args:
        machines: the ranks of each.
    """
    machine_of = {rank: number for number, its in enumerate(machines) for rank in its}
    within = {p: t for p, t in times.items() if machine_of.get(p[0]) == machine_of.get(p[1])}
    between = {p: t for p, t in times.items() if p not in within}
    ranks: set[int] = set()
    pairs: set[Pair] = set()
    for alike, noise in ((within, _NOISE_WITHIN), (between, _NOISE_BETWEEN)):
        best: dict[int, PairTime] = {}
        for pair, it in alike.items():
            for rank in pair:
                other = best.get(rank, it)
                best[rank] = PairTime(min(other.latency, it.latency), max(other.rate, it.rate))
        slow = _outliers(best, noise)
        ranks |= slow
        rest = {pair: it for pair, it in alike.items() if not slow.intersection(pair)}
        pairs |= _outliers(rest, noise)
    return Slow(tuple(sorted(ranks)), tuple(sorted(pairs)))


def _outliers(times: Mapping[Key, PairTime], noise: float) -> set[Key]:
    if len(times) < _FEWEST:
        return set()
    rate = median_high(it.rate for it in times.values())
    usual = median_low(it.latency for it in times.values())
    late = max(_LATENCY * usual, usual + noise)
    return {key for key, it in times.items() if it.latency > late or it.rate < _RATE * rate}


def check_pairs(slow: Slow, measured: int) -> list[Finding]:
    """Say what `find_slow` has found among so many pairs."""
    found = []
    if slow.ranks:
        text = f"{name_ranks(slow.ranks)}: every pair is slow beside the others"
        remedy = "Look at that machine's cable, switch port, interface speed and load"
        found.append(warn("links", text, remedy))
    if slow.pairs:
        shown = ", ".join(f"{a}-{b}" for a, b in slow.pairs[:8])
        rest = f" and {len(slow.pairs) - 8} more" if len(slow.pairs) > 8 else ""
        remedy = "Look at the switches between their machines; place ranks that talk close by"
        found.append(warn("links", f"slow beside the others: {shown}{rest}", remedy))
    alone = "one pair, which nothing can be compared with"
    return found or [ok("links", f"no slow pair among {measured}" if measured > 1 else alone)]


def compute_seconds(device: torch.device, budget: float) -> list[float]:
    """By rank, the least time of a matrix product; all ranks compute at once, as they train."""
    side = _SIDE.get(device.type, _SIDE["cpu"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    run = partial(torch.mm, left, right)
    _timed(run, device)
    dist.barrier()
    times, until = [_timed(run, device)], time.perf_counter() + budget
    while time.perf_counter() < until:
        times.append(_timed(run, device))
    return gather_objects(min(times), default_group())


def check_compute(seconds: Sequence[float]) -> list[Finding]:
    """Compare the ranks' times of one matrix product; of two, the faster is the measure."""
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
