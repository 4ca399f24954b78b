"""Measures the process group and its devices. Collective: all ranks take every step together.

Whether another round is made follows from numbers that all ranks have from a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from fastsync.doctor.schedule import Pair, Round, pair_rounds, partner
from fastsync.doctor.slow import PairTime
from fastsync.torch_private import default_group, gather_objects

__all__ = [
    "Pairs",
    "SizeTime",
    "compute_flops",
    "compute_seconds",
    "look_again",
    "measure_pairs",
    "sweep",
]

_SIZES = (8, 1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 26)  # bytes
_ROUNDS = (3, 50)  # of each size, at least and at most
_LATENCIES, _RATES = 20, 3  # exchanges of a pair
_PAIR_SECONDS = 0.01  # that an exchange may take, for its size
_PAIR_BYTES = (1 << 16, 1 << 22)
_SIDE = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True)
class SizeTime:
    """All-reduces of one size.

    Attributes:
        nbytes: of each rank's buffer.
        seconds: the median of the slowest rank.
        rounds: how many.
        rate: bus bandwidth as nccl-tests define it, 2 (N-1)/N bytes over seconds: what each
            rank's link carries, in bytes per second.
    """

    nbytes: int
    seconds: float
    rounds: int
    rate: float


@dataclass(frozen=True)
class Pairs:
    """Exchanges of pairs: the best of several, since threads that wake late are no fault of a link.

    Attributes:
        times: of pairs (a, b) with a < b, by the slower of both ranks.
        nbytes: that travelled for the rates, in each direction.
        planned: pairs that would have been measured, had there been time.
    """

    times: Mapping[Pair, PairTime]
    nbytes: int
    planned: int


def _timed(run: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _slowest(seconds: float, device: torch.device) -> float:
    """Of all ranks; the same number on each."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def sweep(device: torch.device, budget: float) -> list[SizeTime]:
    """All-reduces by size, as far as `budget` seconds reach; always the smallest."""
    found: list[SizeTime] = []
    spent = 0.0
    for index, nbytes in enumerate(_SIZES):
        share = (budget - spent) / (len(_SIZES) - index)
        if found and _expected(found[-1], nbytes) > budget - spent:
            break
        begun = time.perf_counter()
        found.append(_all_reduces(nbytes, device, share))
        spent += _slowest(time.perf_counter() - begun, device)
    return found


def _expected(last: SizeTime, nbytes: int) -> float:
    """Seconds for the fewest rounds of a size, if time grows with it."""
    return (_ROUNDS[0] + 1) * last.seconds * nbytes / last.nbytes if last.nbytes >= 1 << 16 else 0.0


def _all_reduces(nbytes: int, device: torch.device, budget: float) -> SizeTime:
    buffer = torch.zeros(nbytes // 4, device=device)
    run = partial(dist.all_reduce, buffer)
    _timed(run, device)
    first = _slowest(_timed(run, device), device)
    rounds = min(max(int(budget / max(first, 1e-6) / 2), _ROUNDS[0]), _ROUNDS[1])
    times = []
    for _ in range(rounds):
        dist.barrier()
        times.append(_timed(run, device))
    seconds = _slowest(median(times), device)
    world = dist.get_world_size()
    return SizeTime(nbytes, seconds, rounds, 2 * (world - 1) / world * nbytes / seconds)


def measure_pairs(
    device: torch.device, budget: float, rate: float, say: Callable[[str], None]
) -> Pairs:
    """Latency and rate of pairs of ranks, see `fastsync.doctor.schedule`.

    Args:
        budget: seconds; pairs that find none left are not measured.
        rate: bytes per second that links are thought to have, alike on all ranks.
        say: tells the user how far it is.
    """
    rounds, rank = pair_rounds(dist.get_world_size()), dist.get_rank()
    nbytes = _exchange_bytes(rate)
    mine: dict[Pair, PairTime] = {}
    spent = longest = 0.0
    for number, pairs in enumerate(rounds):
        if spent + longest > budget:
            break
        if number and number % max(1, len(rounds) // 5) == 0:
            say(f"pairs: {number} of {len(rounds)} rounds")
        begun = time.perf_counter()
        peer = partner(pairs, rank)
        if peer is not None:
            mine[min(rank, peer), max(rank, peer)] = _exchanges(peer, nbytes, device)
        took = _slowest(time.perf_counter() - begun, device)
        spent, longest = spent + took, max(longest, took)
    return Pairs(_slower_of_both(gather_objects(mine, default_group())), nbytes, _count(rounds))


def look_again(pairs: Pairs, suspects: Sequence[Pair], device: torch.device) -> Pairs:
    """Measures `suspects`, alike on all ranks, once more, and takes the better of both.

    What disturbs a busy machine for a moment is gone by then.
    """
    mine: dict[Pair, PairTime] = {}
    for pair in suspects:
        dist.barrier()
        peer = partner((pair,), dist.get_rank())
        if peer is not None:
            mine[pair] = _exchanges(peer, pairs.nbytes, device)
    again = _slower_of_both(gather_objects(mine, default_group()))
    return replace(pairs, times={**pairs.times, **_better_of(pairs.times, again)})


def _better_of(
    first: Mapping[Pair, PairTime], again: Mapping[Pair, PairTime]
) -> dict[Pair, PairTime]:
    return {
        pair: PairTime(min(first[pair].latency, it.latency), max(first[pair].rate, it.rate))
        for pair, it in again.items()
    }


def _count(rounds: Sequence[Round]) -> int:
    return sum(len(pairs) for pairs in rounds)


def _exchange_bytes(rate: float) -> int:
    """A power of two that travels in about `_PAIR_SECONDS`."""
    least, most = _PAIR_BYTES
    wanted = max(int(rate * _PAIR_SECONDS), 1)
    return min(max(1 << (wanted.bit_length() - 1), least), most)


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


def _slower_of_both(
    everyones: Sequence[Mapping[Pair, PairTime]],
) -> dict[Pair, PairTime]:
    slower: dict[Pair, PairTime] = {}
    for its in everyones:
        for pair, measured in its.items():
            other = slower.get(pair, measured)
            worst = PairTime(max(other.latency, measured.latency), min(other.rate, measured.rate))
            slower[pair] = worst
    return dict(sorted(slower.items()))


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


def compute_flops(seconds: float, device: torch.device) -> float:
    """Per second, of the product that `compute_seconds` times."""
    return 2.0 * _SIDE.get(device.type, _SIDE["cpu"]) ** 3 / seconds
