"""Many cases, one after the other, in one team of ranks."""

import os
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fastsync.testing import RankError, run_ranks
from tests.fuzz.random_cases.case import Case
from tests.fuzz.random_cases.wrapped import Seat
from tests.fuzz.random_units.case import UnitCase

__all__ = ["Tally", "check_cases", "world_of"]

# What is drawn: models under FastDDP, or trees of modules under fully_shard().
FAMILIES = {"models": Case, "units": UnitCase}
CASES_PER_TEAM = 60
SECONDS_PER_CASE = 60  # a case that takes longer hangs


@dataclass
class Tally:
    """Record of what has been run: cases, the slowest, and how often each kind was drawn."""

    cases: int = 0
    seconds: float = 0.0
    slowest: tuple = (0.0, None)
    kinds: Counter = field(default_factory=Counter)

    def add(self, seed, seconds, kinds):
        self.cases += 1
        self.seconds += seconds
        self.slowest = max(self.slowest, (seconds, seed))
        self.kinds.update(kinds)

    def __str__(self):
        mean = 1000 * self.seconds / max(1, self.cases)
        slowest, seed = self.slowest
        return (
            f"{self.cases} cases, {mean:.0f} ms each, slowest {seed} with {1000 * slowest:.0f} ms"
        )


def world_of(seed):
    """Return how many ranks a case has: 4, 3 or, mostly, 2."""
    return {7: 4, 3: 3, 11: 3}.get(seed % 16, 2)


# Ways to divide ranks that average some parameters apart.
DIVIDED = {
    1: [[[0]]],
    2: [[[0, 1]], [[0], [1]]],
    3: [[[0, 1, 2]], [[0, 2], [1]], [[0], [1], [2]]],
    4: [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1, 3], [2]], [[0, 3], [1], [2]]],
}


def seat_of(rank, world, mesh_size):
    """Return a rank's seat among those that have the same parts of DTensors. Collective."""

    def group_of(parts):
        """Return this rank's among groups, given by places beside each rank of a mesh."""
        parts = [[m + mesh_size * p for p in part] for m in range(mesh_size) for part in parts]
        groups = [(part, dist.new_group(part)) for part in parts]
        return next(group for part, group in groups if rank in part)

    mesh = init_device_mesh("cpu", (world // mesh_size, mesh_size), mesh_dim_names=("dp", "tp"))
    among = world // mesh_size
    everyone = [list(range(among))]
    judges, second, first = (group_of(everyone) for _ in range(3))
    apart = tuple((parts, group_of(parts)) for parts in DIVIDED[among])
    return Seat(rank // mesh_size, among, judges, second, apart, first, mesh["tp"])


def seat_on(device, rank, world):
    """Return a rank's seat, whose groups serve any number of cases. Collective.

    On another device than the CPU nothing is a DTensor.
    """
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if world == 4:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    sizes = [size for size in (1, 2) if world % size == 0]
    folded = tuple(seat_of(rank, world, size) for size in sizes)
    seat = replace(folded[0], first=None, mesh=None, folded=folded)
    return seat if device == "cpu" else replace(seat, folded=(), device=device)


def run_cases(rank, world, seeds, folder, family="models"):
    """Run cases one after the other, and leave the number of the current one in a file.

    Returns:
        Of each case its number, its seconds and the kinds of what was drawn.
    """
    seat = seat_on("cpu", rank, world)
    with (folder / str(rank)).open("w") as file:
        return [run_case(seed, seat, file, family) for seed in seeds]


def run_case(seed, seat, file, family="models"):
    """Run a case; keep its number and what was drawn in a file, for whoever ends the rank."""
    warnings.simplefilter("ignore")
    start = time.monotonic()
    file.seek(0)
    file.truncate()
    log = []
    note(file, log, str(seed))
    on_device = nullcontext() if seat.device == "cpu" else torch.device(seat.device)
    with on_device:
        FAMILIES[family](seed, seat, partial(note, file, log)).run()
    return seed, time.monotonic() - start, log[1:]


def note(file, log, entry):
    """Write down what a rank that crashes or hangs was about to do."""
    log.append(entry)
    print(entry, file=file, flush=True)


def check_cases(seeds, tally=None, family="models"):
    """Run cases; a failure names the first case that failed, and the command that repeats it."""
    tally = tally or Tally()
    for world in (2, 3, 4):
        mine = [seed for seed in seeds if world_of(seed) == world]
        for start in range(0, len(mine), CASES_PER_TEAM):
            for entry in check_team(world, mine[start : start + CASES_PER_TEAM], family):
                tally.add(*entry)
    return tally


def check_team(world, seeds, family):
    of = "" if family == "models" else f" --of {family}"
    command = f"python -m tests.fuzz.test_random{of} --case"
    timeout = SECONDS_PER_CASE + 3 * len(seeds)  # on a busy machine
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with naming_the_case(seeds, folder, command):
            return run_ranks(run_cases, world, seeds, folder, family, timeout=timeout)[0]


@contextmanager
def naming_the_case(seeds, folder, command):
    """Have an error say which of the cases failed, and how to repeat it."""
    try:
        yield
    except RankError as error:
        logs = [path.read_text().splitlines() for path in folder.iterdir()]
        first = min(logs, key=lambda log: seeds.index(int(log[0])), default=[str(seeds[0])])
        said = ", ".join(first[1:])
        raise AssertionError(f"again with: {command} {first[0]}\n({said})\n{error}") from None
