"""Times what all ranks do at once, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
import torch.distributed as dist

__all__ = ["in_turns", "rounds", "slowest", "together"]

_SECONDS = 0.6  # for each figure
_FEWEST = 5


def together(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `run` on the slowest rank."""
    return in_turns([run], device)[0]


def in_turns(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """That of each, in as many rounds as rank 0 has time for."""

    def once(run: Callable[[], object]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    for run in runs:
        once(run)
    times = [[once(run) for run in runs] for _ in rounds(device)]
    return [slowest(median(column), device) for column in zip(*times, strict=True)]


def rounds(device: torch.device) -> Iterator[None]:
    """As many on every rank as rank 0 has time for."""
    until, made = time.perf_counter() + _SECONDS, 0
    while _agreed(made < _FEWEST or time.perf_counter() < until, device):
        made += 1
        yield


def _agreed(goes_on: bool, device: torch.device) -> bool:
    """Rank 0's answer."""
    answer = torch.tensor([float(goes_on)], device=device)
    dist.broadcast(answer, 0)
    return bool(answer.item())


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks'."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())
