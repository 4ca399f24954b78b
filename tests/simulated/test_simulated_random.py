"""Random cases with models, copies and gradients on the simulated device.

Some cases again: python -m tests.simulated.test_simulated_random NUMBER...
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.random_cases.team import naming_the_case, run_case, seat_on, world_of
from tests.simulated.ranks import run_simulated

DEVICE = "sim"
DRAWN = 2
FIXED = 280  # of which more than 200 have two ranks
SHARD = 56


def on_the_device(rank, world, seeds, folder):
    """Run cases under the race detector; return the races."""
    from tests.simulated.device import detecting

    seat = seat_on(DEVICE, rank, world)
    races = []
    with (folder / str(rank)).open("w") as file:
        for seed in seeds:
            found = []
            with detecting(found):
                run_case(seed, seat, file)
            races += [f"case {seed}: {race}" for race in found]
    return races


def check_on_the_device(seeds, folder):
    seeds = [seed for seed in seeds if world_of(seed) == 2]
    command = "python -m tests.simulated.test_simulated_random"
    with naming_the_case(seeds, folder, command):
        found = run_simulated(on_the_device, 2, seeds, folder, timeout=60 + 10 * len(seeds))
    for races in found:
        assert not races, "\n".join(races)


def test_cases_of_this_run(tmp_path):
    start = int.from_bytes(os.urandom(4), "big")
    check_on_the_device(range(start, start + DRAWN), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, FIXED, SHARD))
def test_fixed_cases(start, tmp_path):
    check_on_the_device(range(start, start + SHARD), tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as kept:
        check_on_the_device(map(int, sys.argv[1:]), Path(kept))
