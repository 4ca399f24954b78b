"""run_ranks: results, failures, crashes and hangs of real ranks."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from fastsync.testing import RankError, count_dispatched_ops, run_ranks


def gather_ranks(rank, world, offset):
    mine = torch.tensor([rank + offset])
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    return rank, torch.cat(everyone), torch.get_num_threads()


def fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("the flux capacitor")
    dist.barrier()


def crash_on_one(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def exit_silently(rank, world):
    if rank == 0:
        os._exit(0)


def hang_on_one(rank, world, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(600)


def return_unpicklable(rank, world):
    return lambda: None


def group_is_fresh(rank, world):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    return dist.get_backend()


def test_results_in_rank_order():
    results = run_ranks(gather_ranks, 3, 10)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert all(torch.equal(seen, torch.tensor([10, 11, 12])) for _, seen, _ in results)
    assert all(threads == 1 for _, _, threads in results)


def test_many_calls_do_not_meet():
    assert [run_ranks(group_is_fresh, 2) for _ in range(3)] == [["gloo", "gloo"]] * 3


def test_a_failing_rank_is_named_with_its_traceback():
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_one, 2, grace=1)
    text = str(caught.value)
    assert "rank 1 raised" in text
    assert "ValueError: the flux capacitor" in text
    assert "in fail_on_one" in text


def test_a_crash_is_named_with_its_signal():
    with pytest.raises(RankError, match="rank 1 was killed by SIGSEGV"):
        run_ranks(crash_on_one, 2, grace=1)


def test_a_rank_that_leaves_without_a_result():
    with pytest.raises(RankError, match="rank 0 ended with exit code 0 without a word"):
        run_ranks(exit_silently, 2, grace=1)


@pytest.mark.slow
def test_a_hang_is_named_shown_and_killed(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(hang_on_one, 2, tmp_path, timeout=4)
    text = str(caught.value)
    assert "rank 1 was still running after 4 s" in text
    assert "in hang_on_one" in text
    assert "rank 0" not in text
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RankError, match="rank 0 raised"):
        run_ranks(return_unpicklable, 2, grace=1)


def test_dispatched_ops_are_counted():
    x = torch.ones(3)
    one = count_dispatched_ops(lambda: x + 1)
    assert one >= 1
    assert count_dispatched_ops(lambda: [x + 1 for _ in range(10)]) == 10 * one
