"""Parts of each batch by the speed of the ranks: faster ranks take more samples.

A rank's speed is the number of samples of its part, over the time in which it did not wait for
others. Speeds travel with the weights of the micro-batches, so all ranks learn them at the same
step, and cut later batches by them alike.

[Note: batches that are drawn ahead]
A data loader draws batches before they are needed, and ranks need not draw as many. Each rank sends
how many it has drawn, and new speeds hold from the first batch that no rank has drawn. The samples
of a part are counted when its backwards have run: parts are trained in the order in which they were
drawn, and between two draws one of them is.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from fastsync._build.env import Env
from fastsync.ddp.fast_ddp import FastDDP
from fastsync.ddp.sharded import ShardedDDP
from fastsync.faults.consensus import RankMismatchError, Statement, agree
from fastsync.fsdp.fsdp_module import FSDPModule, context_of, weights_of
from fastsync.reducer.mean_weights import MeanWeights
from fastsync.reducer.monitor import make_rendezvous, watched

WINDOW = 16  # parts whose speeds a rank takes the median of
GAIN = 0.03  # of the step, which new parts must gain: less is noise
_FINENESS = 1 << 30  # of speeds, of the fastest rank's
_AHEAD = 4096  # parts that may be drawn and not trained
_REMEDY = (
    "Make fastsync.Shares on every rank, with the same total, right after the model, and use its "
    "parts on every rank"
)


def divide(total: int, speeds: Sequence[float]) -> list[int]:
    """Return parts of `total` that are proportional to `speeds` and at least 1.

    Ranks that have the same speeds get the same parts. What is left over goes to the ranks with the
    largest remainders, and of equal ones to the first.

    Raises:
        ValueError: there are fewer than one for each, or a speed is not a positive number.
    """
    if total < len(speeds):
        raise ValueError(f"a batch of {total} cannot be divided among {len(speeds)} ranks")
    if not all(0 < speed < float("inf") for speed in speeds):
        raise ValueError(f"speeds are positive numbers, not {list(speeds)}")
    top = max(speeds)
    whole = [max(1, round(_FINENESS * speed / top)) for speed in speeds]  # sums are exact
    over = [max(0, total * each - sum(whole)) for each in whole]  # one sample
    free = total - len(speeds)
    parts = [1 + free * each // max(1, sum(over)) for each in over]
    order = sorted(range(len(over)), key=lambda r: (-(free * over[r] % max(1, sum(over))), r))
    for rank in order[: total - sum(parts)]:
        parts[rank] += 1
    return parts


def step_time(parts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how long the last rank takes for its part."""
    return max(part / speed for part, speed in zip(parts, speeds, strict=True))


class _Speeds(NamedTuple):
    """Speeds by which batches are divided, from batch number `first` on."""

    first: int
    speeds: Sequence[float]


class Shares:
    """The parts of the ranks in each batch of one model.

    Collective: every rank makes it, before the first step. Batches have one part for each rank and
    are divided evenly at first. Every micro-batch of a part needs its weight, by `add_weight()`.

    Args:
        model: a FastDDP model, or the root of `fully_shard`.
        total: samples in a batch, over all ranks.

    Attributes:
        total: as given.
        parts: samples of each rank in the next batch that this rank draws.

    Raises:
        RankMismatchError: the ranks differ in `total`.
        SyncFault: a rank does not come.
        ValueError: it cannot be divided, or the model's steps cannot be timed.
    """

    numbers = 3

    def __init__(self, model: nn.Module, total: int) -> None:
        self._weights, self._busy = _timed(model)
        group = self._weights.group
        self._rank, self._world = group.rank(), group.size()
        self.total = total
        even = [1.0] * self._world
        divide(total, even)
        self._changes = [_Speeds(0, even)]
        self._drawn = 0  # batches, by this rank
        self._untrained: deque[int] = deque()  # the samples of its parts
        self._measured: deque[float] = deque(maxlen=WINDOW)
        self._since = (self._busy(), self._weights.backwards)
        self._stamp = 0  # of the order of the samples
        self._rendezvous = make_rendezvous(group, "shares", Env.read().agree_timeout)
        self._compare("batches that they divide", {"total": str(total)})
        self._weights.divides = self

    def _compare(self, what: str, settings: dict[str, str]) -> None:
        """
        Raises:
            RankMismatchError: the ranks differ in them.
            SyncFault: a rank does not come.
        """
        group, device = self._weights.group, self._weights.device
        self._rendezvous.meet(f"the others to settle the {what}", remedy=_REMEDY)
        run = partial(watched, group, f"the comparison of the {what}")
        agree(Statement(settings, ()), group, device, f"{what} differ:", run)

    @property
    def parts(self) -> list[int]:
        """Return the samples of each rank in the next batch that this rank draws."""
        return divide(self.total, self._speeds_of(self._drawn))

    def next(self) -> slice:
        """Return where this rank's part of the next batch lies among the batch's samples.

        Call it once for each batch, when the part before has been trained.
        """
        part = self._draw(self.total)
        while len(self._untrained) > 1:
            self._untrained.popleft()  # of batches that were left out
        return part

    def sampler(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> ShareSampler:
        """Return a batch sampler of this rank's parts. Collective.

        Raises:
            RankMismatchError: the ranks differ in the arguments.
            ValueError: there is less than a sample for each rank.
        """
        settings = {"len(dataset)": str(len(dataset)), "shuffle": str(shuffle), "seed": str(seed)}
        self._compare("samples of a sampler", settings)
        if len(dataset) < self._world:
            raise ValueError(f"{len(dataset)} samples cannot be divided among {self._world} ranks")
        return ShareSampler(self, len(dataset), shuffle, seed)

    def count(self, samples: int) -> int:
        """Return how many batches an epoch of so many samples has."""
        batches, rest = divmod(samples, self.total)
        # What is not enough for another batch is part of the last one.
        return batches + (batches == 0 or rest >= self._world)

    def batches(self, order: Sequence[int], stamp: int) -> Iterator[list[int]]:
        """Yield this rank's samples of each batch of an epoch.

        Args:
            order: all samples, the same on every rank.
            stamp: stands for that order.
        """
        self._untrained.clear()  # of an epoch that was left early
        self._restart()
        self._stamp = stamp
        batches = self.count(len(order))
        for batch in range(batches):
            first = batch * self.total
            last = first + self.total if batch < batches - 1 else len(order)
            part = self._draw(last - first)
            yield list(order[first + part.start : first + part.stop])

    def _draw(self, size: int) -> slice:
        self._note_trained()
        parts = divide(size, self._speeds_of(self._drawn))
        self._drawn += 1
        self._untrained.append(parts[self._rank])
        if len(self._untrained) > _AHEAD:
            raise RuntimeError(
                f"{_AHEAD} parts of batches were drawn and not trained: draw one for each backward"
            )
        start = sum(parts[: self._rank])
        return slice(start, start + parts[self._rank])

    def _speeds_of(self, batch: int) -> Sequence[float]:
        if self._weights.divides is not self:
            raise RuntimeError(
                "the model divides other batches now, or has other ranks: make fastsync.Shares anew"
            )
        while len(self._changes) > 1 and self._changes[1].first <= batch:
            self._changes.pop(0)
        return self._changes[0].speeds

    # --- speeds

    def _note_trained(self) -> None:
        """Measure the part that has been trained since the last draw, if any has."""
        busy, backwards = self._since
        if self._weights.backwards == backwards:
            return
        self._restart()
        if self._untrained and (seconds := self._since[0] - busy) > 0:
            self._measured.append(self._untrained.popleft() / seconds)

    def _restart(self) -> None:
        self._since = (self._busy(), self._weights.backwards)

    def mine(self) -> Sequence[float]:
        """Return how many batches this rank has drawn, of which samples, and its speed.

        Called at the start of a backward. A speed of 0 is not known.
        """
        is_known = len(self._measured) == WINDOW
        return self._drawn, self._stamp, median(self._measured) if is_known else 0.0

    def agree(self, step: int, numbers: Sequence[Sequence[float]]) -> None:
        """Take what `mine` returned on each rank, and change the parts if that gains much.

        Raises:
            RankMismatchError: ranks train on other batches than the others.
        """
        drawn, stamps, speeds = zip(*numbers, strict=True)
        _check(step, drawn, stamps)
        current = self._changes[-1].speeds
        if not all(speeds):
            return
        now, new = divide(self.total, current), divide(self.total, speeds)
        if step_time(new, speeds) < (1 - GAIN) * step_time(now, speeds):
            self._changes.append(_Speeds(int(max(drawn)), speeds))
            self._measured.clear()


class ShareSampler:
    """A batch sampler of this rank's parts: for `DataLoader(dataset, batch_sampler=...)`.

    Every epoch has each sample once, in another order with `shuffle`. The last batch may be
    smaller, or take in up to a sample for each rank.
    """

    def __init__(self, shares: Shares, samples: int, shuffle: bool, seed: int) -> None:
        self._shares, self._samples = shares, samples
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin with another epoch than 0; epochs count themselves."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        order = list(range(self._samples))
        if self._shuffle:
            draw = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._samples, generator=draw).tolist()
        stamp = zlib.crc32(f"{self._samples} {self._shuffle} {self._seed} {epoch}".encode())
        return self._shares.batches(order, stamp)

    def __len__(self) -> int:
        return self._shares.count(self._samples)


def _check(step: int, drawn: Sequence[float], stamps: Sequence[float]) -> None:
    """
    Raises:
        RankMismatchError: ranks train on other batches than the others.
    """
    none = [rank for rank, count in enumerate(drawn) if not count]
    if none and any(drawn):
        raise RankMismatchError(
            f"ranks {none} have drawn no part of a batch by step {step}, unlike the others. "
            f"{_REMEDY}"
        )
    others = [rank for rank, stamp in enumerate(stamps) if stamp != stamps[0]]
    if others:
        raise RankMismatchError(
            f"in step {step}, ranks {others} train on samples of another sampler or epoch than "
            "rank 0. Begin the same epoch of the same sampler on every rank"
        )


def _timed(model: nn.Module) -> tuple[MeanWeights, Callable[[], float]]:
    """Return a model's weights, and the seconds in which this rank has waited for no other.

    Raises:
        ValueError: they cannot be told, or what the model has does not go with weights.
    """
    if isinstance(model, FastDDP):
        weights, root = model._weights(), model.module
    elif isinstance(model, FSDPModule):
        weights, root = weights_of(model), model
    else:
        raise ValueError(
            f"Shares expects a FastDDP model or a root of fully_shard, not {type(model).__name__}"
        )
    if weights.device.type != "cpu":
        raise ValueError(
            "Shares measures ranks whose parameters are on the CPU: on a device the host does not "
            "know when the device waits"
        )
    if isinstance(model, FastDDP) and not isinstance(model, ShardedDDP):
        engine = weakref.ref(model._engine)
        return weights, lambda: 0.0 if (e := engine()) is None else e.core.busy_seconds()
    context = weakref.ref(context_of(root))

    def busy() -> float:
        alive = context()
        waited = 0.0 if alive is None else sum(c["waited_seconds"] for c in alive.counters())
        return time.perf_counter() - waited - weights.waited

    return weights, busy
