"""examples/limited_memory.py: a limit on memory that ends zero=0, and that zero=3 trains within."""

import re

import pytest

from tests.scripts import run_module

NO_MEMORY = r"zero=0, rank {}: .*can't allocate memory"
TRAINED = r"zero=3: losses ([\d. ]+) peak ([\d.]+)x"


@pytest.mark.slow
def test_zero_0_runs_out_of_memory_on_every_rank_and_zero_3_learns():
    output = run_module("examples.limited_memory")
    for rank in range(2):
        assert re.search(NO_MEMORY.format(rank), output)
    losses, peak = re.search(TRAINED, output).groups()
    first, *_, last = map(float, losses.split())
    assert last < first - 0.5
    assert 2.0 <= float(peak) <= 2.3


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "found"), [(8, "zero=0: losses"), (1.5, "zero=3, rank 0:")])
def test_another_limit_than_one_between_the_two_fails(limit, found):
    assert found in run_module("examples.limited_memory", "--limit", limit, code=1)
