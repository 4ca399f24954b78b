"""A meeting ends when all have come, or says who has not."""

import time

import torch.distributed as dist

from fastsync.ranks.meeting import meet
from fastsync.testing import run_ranks


def arrive(rank, world, absent):
    time.sleep(0.1 * rank)
    try:
        if rank not in absent:
            meet(dist.group.WORLD, "here", "nothing in particular", 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_come():
    assert run_ranks(arrive, 3, ()) == ["", "", ""]


def test_some_do_not():
    results = run_ranks(arrive, 4, (1, 3))
    for rank in (0, 2):
        text = results[rank]
        assert f"rank {rank} waited 1 s for nothing in particular" in text
        assert "ranks [1, 3] did not come" in text
    assert results[1] == results[3] == ""


def meet_in_groups(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for place in ("one", "two"):
        meet(groups[rank // 2], place, "my pair", 20)
        meet(dist.group.WORLD, place, "everyone", 20)
    return True


def test_subgroups_meet_by_themselves():
    assert run_ranks(meet_in_groups, 4) == [True] * 4


def meet_alone(rank, world):
    meet(dist.group.WORLD, "here", "company", 0.01)
    return True


def test_one_rank_needs_no_company():
    assert run_ranks(meet_alone, 1) == [True]
