"""Throughput of ranks of unequal speed: batches cut evenly, and by `fastsync.Shares`.

    python -m bench shares --models gpt2,paced --seconds 120 --json out/shares.json

[Note: Speeds]
The last rank is `--slow` times as slow as the others. `paced` computes by sleeping, by the number
of samples; its sleeps are that much longer. Where a model computes, a process stops the rank and
lets it go on in turns of 10 ms, as `cpulimit` does.

Ways take turns, a burst of steps each. "One by one", each rank trains its part by itself without
synchronising, while the others do nothing: the throughput is the sum of these speeds. "Not
synchronised", all ranks do so at once, which shows what they cost each other by computing.
Otherwise throughput is samples over the time of the slowest rank, ratios are of the same round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import benchmark as b
from examples.common.ranks import Group, argument, whole
from examples.common.rounds import FEWEST_ROUNDS, in_turn
from examples.common.text import Progress
from examples.common.training import Workload
from fastsync import FastDDP, Shares

ALONE, APART, EVEN, SHARES = "one by one", "not synchronised", "even parts", "shares"
WAYS = (ALONE, APART, EVEN, SHARES)
SAMPLE = 0.02  # seconds of a sample of `paced` on a rank that is not slow
TURN = 0.01  # seconds
_STOPS = """
import os, signal, sys, time
rank, turn, slow = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
def end(*_):
    os.kill(rank, signal.SIGCONT)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print(flush=True)
while os.getppid() == rank:
    time.sleep(turn)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(turn * (slow - 1))
    os.kill(rank, signal.SIGCONT)
"""


@contextmanager
def stopped(slow: float) -> Iterator[None]:
    """Let this process run for a part of the time."""
    command = [sys.executable, "-c", _STOPS, str(os.getpid()), str(TURN), str(slow)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


class Trainings:
    """One model in every way, on the same samples."""

    def __init__(self, workload: Workload, group: Group, args: argparse.Namespace) -> None:
        self._workload, self._group, self._steps = workload, group, args.steps
        self._slow = args.slow if group.rank == group.world - 1 else 1.0
        self._total = args.total
        self._models: dict[str, Any] = {
            ALONE: workload.build(),
            EVEN: FastDDP(workload.build()),
            SHARES: FastDDP(workload.build()),
        }
        self._models[APART] = self._models[ALONE]
        self.shares = Shares(self._models[SHARES], args.total)
        pool, step = workload.batch(0, 0), 1
        while len(pool) < args.total:
            pool, step = torch.cat((pool, workload.batch(0, step))), step + 1
        self._pool = pool[: args.total]

    def _step(self, way: str, part: slice) -> None:
        model, x = self._models[way], self._pool[part]
        if hasattr(module := getattr(model, "module", model), "pace"):
            module.pace(SAMPLE * self._slow * len(x))
        loss = self._workload.loss(model(x))
        if way == SHARES:
            loss = model.add_weight(len(x), mean=loss)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param.grad = None

    def _part(self, way: str) -> slice:
        if way == SHARES:
            return self.shares.next()
        parts = self.shares.parts
        if way == EVEN:
            parts = [self._total // self._group.world] * self._group.world
        first = sum(parts[: self._group.rank])
        return slice(first, first + parts[self._group.rank])

    def burst(self, way: str) -> float:
        """Return samples per second."""
        turns = range(self._group.world) if way == ALONE else (self._group.rank,)
        samples, seconds = 0, 0.0
        for turn in turns:
            dist.barrier()
            if turn != self._group.rank:
                continue
            self._step(way, self._part(way))  # not timed
            for _ in range(self._steps):
                part = self._part(way)
                samples += part.stop - part.start
                seconds += self._group.timed(partial(self._step, way, part))
        if way in (ALONE, APART):
            return self._group.mean(torch.tensor(samples / seconds)) * self._group.world
        everyones = self._group.mean(torch.tensor(float(samples))) * self._group.world
        return everyones / self._group.most(seconds)


def measure(workload: Workload, group: Group, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return a row for each way."""
    trainings, progress = Trainings(workload, group, args), Progress(group)
    for _ in range(args.warmup):
        trainings.burst(SHARES)
    once = group.most(group.timed(lambda: [trainings.burst(way) for way in WAYS]))
    count = min(args.rounds, max(FEWEST_ROUNDS, int(args.seconds / once)))

    def show(index: int) -> None:
        progress.show(f"{workload.name}: round {index + 1}/{count}")

    found = in_turn(WAYS, trainings.burst, count, show)

    def over(way: str, base: str) -> str:
        return b.with_margin([s / a for s, a in zip(found[way], found[base], strict=True)])

    parts = " + ".join(map(str, trainings.shares.parts))
    names = {way: way for way in WAYS} | {SHARES: f"{SHARES}, {parts}"}
    return [
        (workload.name, names[w], f"{median(found[w]):.1f}", over(w, ALONE), over(w, APART))
        for w in WAYS
    ]


@b.benchmark(
    argument("--slow", "times that the last rank takes longer", 3.0, type=b.positive),
    argument("--total", "samples in a batch", 32, type=whole),
    *(b.models("gpt2"), b.SCALE, b.RANKS, b.rounds(200), b.steps(10), b.warmup(6)),
    b.seconds(60.0),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    rows = []
    for name in args.models:
        slows = group.rank == group.world - 1 and name != "paced"
        with stopped(args.slow) if slows else nullcontext():
            rows += measure(b.workload(name, args), group, args)
    title = f"batches of {args.total} on {group.world} ranks, the last one slower; {b.MARGIN}"
    yield b.table(title, ("model", "way", "samples/s", f"of {ALONE}", f"of {APART}"), rows)
