"""Collectives over MPI: random ones against Gloo, and torch's own tests of them."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.mpi import jobs, training


def random_collectives(ranks, count):
    ended = jobs.mpirun(ranks, "-m", "tests.mpi.random_collectives", "--count", str(count))
    assert ended.code == 0, ended.text
    assert f"{count} random collectives of {ranks} ranks" in ended.text
    return ended.text


def test_random_collectives_against_gloo():
    text = random_collectives(2, 300)
    assert int(re.search(r"(\d+) comparisons clean", text)[1]) > 300


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_random_collectives_of_more_ranks(ranks):
    random_collectives(ranks, 300)


@pytest.mark.slow
def test_collectives_of_torchs_own_suite():
    """99 pass with four ranks; what is skipped wants GPUs, or another number of ranks."""
    ended = jobs.mpirun(4, "-m", "tests.mpi.torch_collectives", timeout=600)
    passed, failed = re.search(r"(\d+) passed, \d+ skipped, (\d+) failed", ended.text).groups()
    assert (ended.code, int(failed)) == (0, 0), ended.text
    assert int(passed) >= 90


def two_gibibytes(rank, world):
    tensor = torch.full((2**31 + 5,), rank, dtype=torch.uint8)
    dist.broadcast(tensor, 1)
    return int(tensor[0]), int(tensor[-1]), int(tensor[2**31 - 1])


@pytest.mark.slow
def test_a_message_of_more_than_two_gibibytes():
    assert jobs.run_ranks(two_gibibytes, 2) == [(1, 1, 1)] * 2


def many_at_once(rank, world):
    """Large ones have a second half, which all ranks have to begin in the same order."""
    tensors = [torch.ones(n) for n in (3, 200_000, 5, 70_000, 1) * 8]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    futures = [work.get_future().then(lambda done: done.value()[0].sum()) for work in works]
    assert all(work.is_completed() or work.wait() for work in reversed(works))
    return [float(future.wait()) for future in futures]


def test_large_and_small_ones_at_once():
    due = [2.0 * n for n in (3, 200_000, 5, 70_000, 1)] * 8
    assert jobs.run_ranks(many_at_once, 2) == [due, due]


@pytest.mark.slow
def test_groups_are_given_back():
    assert jobs.run_ranks(training.many_groups, 2) == [2.0, 2.0]
