"""What looking out for faults costs while nothing happens: python -m docs.measure_price

    python -m docs.measure_price --json bench/results/price.json

Three trainings of each model take turns, in processes of their own: one in which nobody looks out,
one whose ranks do, and one that moreover compares what they have every ten steps. A rank tells its
neighbours where it is ten times a second, also while it waits for its turn. So the processes of the
other trainings are stopped meanwhile. A burst has whole tens of steps, and its time is that of the
slowest rank.

A busy machine's steps vary by more than all of that costs. So it is counted by itself, too: what
the watch's thread has of the processor, and by how much the step that compares takes longer than
the nine before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from bench.measure import benchmark as b
from bench.measure.jobs import Job
from bench.models import WORKLOADS
from bench.models.workload import CPU_SCALE
from examples.common.ranks import Group, argument
from examples.common.rounds import FEWEST_ROUNDS, over
from examples.common.training import Lane, make_lane
from examples.common.variants import Variant, fast_ddp
from fastsync import ReplicaPolicy

EVERY = 10  # steps between two comparisons
FREE = "nobody looks out"
# Whether ranks look out for each other, and compare what they have.
WAYS = {FREE: (False, False), "watch": (True, False), "watch and digests": (True, True)}
OTHERS = [way for way in WAYS if way != FREE]
WATCH = "fastsync-watch"  # as csrc/comm/peers.cpp names its thread


@dataclass(frozen=True)
class Burst:
    """Steps of one rank, in seconds.

    Attributes:
        steps: of each, by the clock.
        processor: of all threads, of all steps; `watch`: of the watch's thread.
    """

    steps: list[float]
    processor: float
    watch: float


def watch_seconds() -> float:
    """What this process's watch has had of the processor so far."""
    taken = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == WATCH:
                taken += int((task / "schedstat").read_text().split()[0])
    return 1e-9 * taken


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

    def alone(self, lane: Lane, steps: int) -> Burst:
        """So many steps, while no process of another training runs."""
        self._signal(signal.SIGSTOP)
        try:
            begun, watched = time.process_time(), watch_seconds()
            seconds = [self.group.timed(lane.step) for _ in range(steps)]
            return Burst(seconds, time.process_time() - begun, watch_seconds() - watched)
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
    wrap = fast_ddp(process_group=team.ranks, replicas=policy)
    workload = WORKLOADS[name](scale=CPU_SCALE if name == "gpt2" else 1.0)  # for two cores
    return make_lane(workload, Variant(name, wrap), team.group, "sgd")


@dataclass(frozen=True)
class Taken:
    """By way, one number for each round.

    Attributes:
        clock: seconds of a step, of the rank that takes longest.
        processor: of a step, of all ranks together.
        watch: share of the time in which a rank's watch ran.
        comparing: share of the time by which the last step of each ten was longer than the others.
    """

    clock: dict[str, list[float]]
    processor: dict[str, list[float]]
    watch: dict[str, list[float]]
    comparing: dict[str, list[float]]

    @classmethod
    def of(cls, bursts: dict[str, list[tuple[Burst, ...]]]) -> Taken:
        """From those of all ranks, by way and round."""

        def each(number: Callable[[tuple[Burst, ...]], float]) -> dict[str, list[float]]:
            return {way: [number(ranks) for ranks in rounds] for way, rounds in bursts.items()}

        return cls(
            each(lambda ranks: max(sum(b.steps) / len(b.steps) for b in ranks)),
            each(lambda ranks: sum(b.processor / len(b.steps) for b in ranks)),
            each(lambda ranks: fmean(b.watch / sum(b.steps) for b in ranks)),
            each(lambda ranks: fmean(longer(b.steps) for b in ranks)),
        )


def longer(steps: Sequence[float]) -> float:
    """By how much the last of each ten steps exceeds the median of the nine before it: its share of
    all ten."""
    tens = [steps[begin : begin + EVERY] for begin in range(0, len(steps), EVERY)]
    return sum(ten[-1] - median(ten[:-1]) for ten in tens) / sum(steps)


def measure(name: str, args: argparse.Namespace, team: Team, all_ranks: Group) -> Taken:
    """Steps of all ways in turns."""
    lane, found = make(name, team), list[Burst]()
    rounds = args.rounds
    for index in range(-1, args.rounds):  # the first one warms up
        if index == 0:
            taken = all_ranks.most(sum(found.pop().steps)) * len(WAYS)
            rounds = max(FEWEST_ROUNDS, min(rounds, int(args.seconds / taken)))
        if index == rounds:
            break
        for turn in range(len(WAYS)):
            dist.barrier()
            if (index + turn) % len(WAYS) == team.number:
                found.append(team.alone(lane, EVERY * args.tens))
    everyones: list[list[Burst]] = [[]] * all_ranks.world
    dist.all_gather_object(everyones, found)
    size = team.group.world
    teams = (everyones[n * size : (n + 1) * size] for n in range(len(WAYS)))
    return Taken.of(
        {w: list(zip(*ranks, strict=True)) for w, ranks in zip(WAYS, teams, strict=True)}
    )


def row(name: str, ranks: int, taken: Taken) -> list[str]:
    """A line of the table."""
    free = taken.clock[FREE]
    ratios = [
        b.with_margin(over(seconds[way], seconds[FREE]))
        for seconds in (taken.clock, taken.processor)
        for way in OTHERS
    ]
    shares = (taken.watch[OTHERS[0]], taken.comparing[OTHERS[-1]])
    percent = [f"{b.with_margin([100 * share for share in rounds])} %" for rounds in shares]
    cells = [*ratios, *percent, str(len(free))]
    return [name, str(ranks), f"{1e3 * median(free):.2f} ms", *cells]


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
    columns = (
        FREE,
        *OTHERS,
        *(f"{way}, processor" for way in OTHERS),
        "watch's thread",
        "comparing",
    )
    title = (
        f"steps with the watch, and with a comparison every {EVERY} steps, over those without "
        f"either, by the clock and by the processor's time of all threads; {b.MARGIN}. What the "
        f"watch's thread and comparing take by themselves, of a step; "
        f"{torch.get_num_threads()} thread(s) per rank"
    )
    yield b.table(title, ("model", "ranks", *columns, "rounds"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
