"""Random cases with models, copies and gradients on the simulated device."""

import pytest

from tests.fuzz.random_cases.team import run_cases, world_of
from tests.simulated.ranks import run_simulated

DEVICE = "sim"
FIXED = 40


def on_the_device(rank, world, seeds, folder):
    """Run cases under the race detector; return the races."""
    from tests.simulated.device import detecting

    races = []
    with detecting(races):
        run_cases(rank, world, seeds, folder, device=DEVICE)
    return races


def check_on_the_device(seeds, folder):
    seeds = [seed for seed in seeds if world_of(seed) == 2]
    for races in run_simulated(on_the_device, 2, seeds, folder, timeout=60 + 10 * len(seeds)):
        assert not races, "\n".join(races)


@pytest.mark.slow
def test_fixed_cases(tmp_path):
    check_on_the_device(range(FIXED), tmp_path)
