"""examples/ring_allreduce.py: the sum, the steps and the bytes of a ring written by hand."""

import pytest
import torch

from examples import ring_allreduce
from examples.common.ranks import Group
from fastsync.testing import run_ranks
from tests.scripts import run_module

SIZES = (1, 7, 4096)


def checked(rank, world):
    group = Group(rank, world, torch.device("cpu"))
    cases = [(numel, dtype) for numel in SIZES for dtype in (torch.float32, torch.int64)]
    return [(dtype, ring_allreduce.check(group, numel, dtype)) for numel, dtype in cases]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sum_steps_and_bytes(world):
    for results in run_ranks(checked, world):
        for dtype, found in results:
            assert found.steps == 2 * (world - 1)
            assert found.sent_by_all == world * found.formula
            assert abs(found.sent - found.formula) <= 2 * dtype.itemsize
            assert found.alike
            assert found.error == 0 if dtype is torch.int64 else found.error < world * 1.2e-7


def forgets_a_step(rank, world):
    ring_allreduce.all_gather = lambda ring, chunks, watch: None
    group = Group(rank, world, torch.device("cpu"))
    found = ring_allreduce.check(group, 4096, torch.float32)
    return ring_allreduce.passes(found, world, torch.float32)


def test_the_check_notices_a_ring_that_stops_early():
    assert run_ranks(forgets_a_step, 3) == [False] * 3


def test_views_are_needed():
    with pytest.raises(ValueError, match="contiguous"):
        ring_allreduce.split(torch.zeros(4, 4).t(), 2)


def test_the_command_shows_steps_and_agrees():
    output = run_module("examples.ring_allreduce", "--ranks", 3, "--numel", 300)
    row = next(line.split() for line in output.splitlines() if line.startswith("300 "))
    assert row == ["300", "4", "1600", "1600.0", "4800", row[5], "equal"]
    last_step = output[output.index(" 4 all-gather") :]
    assert last_step.splitlines()[2].split() == ["2:", "012", "012", "012"]
