"""What looking out for faults costs while nothing happens: python -m docs.measure_price

    python -m docs.measure_price --json bench/results/price.json

Three trainings of each model take turns, in processes of their own: one in which nobody looks out,
one whose ranks do, and one that moreover compares what they have every ten steps. A rank tells its
neighbours where it is ten times a second, also while it waits for its turn. So the processes of the
other trainings are stopped meanwhile. A burst has whole tens of steps, and its time is that of the
slowest rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from bench.measure import benchmark as b
from bench.measure.jobs import Job
from docs.measure_steps import scaled
from examples.common.ranks import Group, argument
from examples.common.rounds import FEWEST_ROUNDS, over
from examples.common.training import Lane, make_lane
from examples.common.variants import Variant, fast_ddp
from fastsync import ReplicaPolicy

EVERY = 10  # steps between two comparisons
FREE = "nobody looks out"
# Whether ranks look out for each other, and compare what they have.
WAYS = {FREE: (False, False), "watch": (True, False), "watch and digests": (True, True)}


@dataclass(frozen=True)
class Team:
    """The ranks of one training, of which this is one.

    Attributes:
        number: place of the training's way among WAYS.
        group: this rank's place.
        ranks: for collectives of the training.
        others: the processes of all other trainings.
    """

    number: int
    group: Group
    ranks: dist.ProcessGroup
    others: Sequence[int]

    @classmethod
    def of(cls, all_ranks: Group) -> Team:
        """Collective."""
        size = all_ranks.world // len(WAYS)
        teams = [list(range(n * size, (n + 1) * size)) for n in range(len(WAYS))]
        groups = [dist.new_group(team) for team in teams]
        processes = [0] * all_ranks.world
        dist.all_gather_object(processes, os.getpid())
        mine = all_ranks.rank // size
        others = [process for rank, process in enumerate(processes) if rank not in teams[mine]]
        place = Group(all_ranks.rank % size, size, all_ranks.device)
        return cls(mine, place, groups[mine], others)

    def alone(self, lane: Lane, steps: int) -> tuple[float, float]:
        """Seconds of so many steps, by the clock and of this rank's processor, in all its threads,
        while no process of another training runs."""
        self._signal(signal.SIGSTOP)
        try:
            begun = time.process_time()
            seconds = self.group.timed(partial(lane.steps, steps))
            return seconds, time.process_time() - begun
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """Sent once all ranks are here: none of them waits for a process that is stopped."""
        dist.barrier(self.ranks)
        if self.group.is_main:
            for process in self.others:
                os.kill(process, number)
        dist.barrier(self.ranks)


def make(name: str, team: Team) -> Lane:
    """This rank's part of its team's training."""
    watched, compared = list(WAYS.values())[team.number]
    os.environ["FASTSYNC_WATCH"] = str(int(watched))
    policy = ReplicaPolicy(every=EVERY) if compared else False
    wrap = fast_ddp(process_group=team.ranks, check_replicas=policy)
    return make_lane(scaled(name, 1.0), Variant(name, wrap), team.group, "sgd")


@dataclass(frozen=True)
class Taken:
    """Of a step of each way, by round, in seconds.

    Attributes:
        clock: of the rank that takes longest.
        processor: of all ranks together.
    """

    clock: dict[str, list[float]]
    processor: dict[str, list[float]]


def measure(name: str, args: argparse.Namespace, team: Team, all_ranks: Group) -> Taken:
    """Steps of all ways in turns."""
    lane, found = make(name, team), []
    rounds = args.rounds
    for index in range(-1, args.rounds):  # the first one warms up
        if index == 0:
            taken = all_ranks.most(found.pop()[0]) * len(WAYS)
            rounds = max(FEWEST_ROUNDS, min(rounds, int(args.seconds / taken)))
        if index == rounds:
            break
        for turn in range(len(WAYS)):
            dist.barrier()
            if (index + turn) % len(WAYS) == team.number:
                found.append(team.alone(lane, EVERY * args.tens))
    everyones: list[list[tuple[float, float]]] = [[]] * all_ranks.world
    dist.all_gather_object(everyones, found)
    size, steps = team.group.world, EVERY * args.tens
    clock, processor = {}, {}
    for n, way in enumerate(WAYS):
        own = list(zip(*everyones[n * size : (n + 1) * size], strict=True))
        clock[way] = [max(seconds for seconds, _ in ranks) / steps for ranks in own]
        processor[way] = [sum(seconds for _, seconds in ranks) / steps for ranks in own]
    return Taken(clock, processor)


def row(name: str, ranks: int, taken: Taken) -> list[str]:
    """A line of the table."""
    free = taken.clock[FREE]
    ratios = [
        b.with_margin(over(seconds[way], seconds[FREE]))
        for seconds in (taken.clock, taken.processor)
        for way in WAYS
        if way != FREE
    ]
    return [name, str(ranks), f"{1e3 * median(free):.2f} ms", *ratios, str(len(free))]


def jobs(args: argparse.Namespace) -> list[Job]:
    return [Job(len(WAYS) * ranks) for ranks in args.ranks]


@b.benchmark(
    *(b.models("gpt2,small"), b.ranks("2", least=1), b.rounds(60), b.seconds(240.0)),
    argument("--tens", f"of {EVERY} steps each, in a burst", 1, type=int),
    jobs=jobs,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """All models in one table."""
    team = Team.of(group)
    rows = []
    for name in args.models:
        taken = measure(name, args, team, group)
        rows.append(row(name, team.group.world, taken))
    others = [way for way in WAYS if way != FREE]
    columns = (FREE, *others, *(f"{way}, processor" for way in others))
    title = (
        f"steps with the watch, and with a comparison every {EVERY} steps, over those without "
        f"either, by the clock and by the processor's time of all threads; {b.MARGIN}; "
        f"{torch.get_num_threads()} thread(s) per rank"
    )
    yield b.table(title, ("model", "ranks", *columns, "rounds"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
