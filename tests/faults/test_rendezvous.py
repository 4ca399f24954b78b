"""A meeting ends when all have come, or says who has not."""

import os
import socket
import time
from itertools import islice

import pytest
import torch.distributed as dist

from fastsync._torch import TCPStore, group_store
from fastsync.faults.rendezvous import Rendezvous, looks
from fastsync.faults.stores import limit_silence
from tests.helpers.teams import run_ranks


def arrive(rank, world, absent):
    time.sleep(0.1 * rank)
    try:
        if rank not in absent:
            Rendezvous(dist.group.WORLD, "here", 1.0).meet("nothing in particular")
    except RuntimeError as error:
        return str(error)
    return ""


def comes_late(rank, world):
    """Return the ranks that had come when this one went on."""
    store = group_store(dist.group.WORLD)
    time.sleep(0.3 * rank)
    store.set(f"came {rank}", "")
    Rendezvous(dist.group.WORLD, "late", 10.0).meet("nothing in particular")
    return [other for other in range(world) if store.check([f"came {other}"])]


def test_nobody_goes_on_before_all_have_come():
    assert run_ranks(comes_late, 3) == [[0, 1, 2]] * 3


def test_all_come():
    assert run_ranks(arrive, 3, ()) == ["", "", ""]


def test_some_do_not():
    results = run_ranks(arrive, 4, (1, 3))
    for rank in (0, 2):
        text = results[rank]
        assert f"rank {rank} waited 1 s for nothing in particular" in text
        assert "ranks [1, 3] did not come" in text
    assert results[1] == results[3] == ""


def test_few_ranks_look_often_and_many_leave_the_store_in_peace():
    assert set(islice(looks(8), 50)) == {0.1}
    for world in (300, 1000, 3000, 100_000):
        pauses = list(islice(looks(world), 20))
        assert pauses == sorted(pauses) and pauses[0] <= 0.2
        assert pauses[-1] == 2.0 or world / pauses[-1] <= 2000


def meet_in_groups(rank, world):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    places = [Rendezvous(group, "here", 20) for group in (pair, dist.group.WORLD, pair)]
    for _ in range(3):
        for place in places:
            place.meet("everyone")
    return True


def test_groups_and_places_of_one_name_meet_by_themselves():
    assert run_ranks(meet_in_groups, 4) == [True] * 4


def say(rank, world):
    place = Rendezvous(dist.group.WORLD, "here", 20)
    words = ["yes", "no" if rank == 1 else "yes", f"I am {rank}", "yes"]
    return [[place.meet("a word", word) for word in words] for _ in range(100)]


def test_ranks_learn_whether_they_agree():
    assert run_ranks(say, 3) == [[[True, False, False, True]] * 100] * 3


def keys_left(rank, world):
    place = Rendezvous(dist.group.WORLD, "here", 20)
    counts = []
    for meeting in range(20):
        place.meet("a word", str(meeting))
        dist.barrier()
        counts.append(group_store(dist.group.WORLD).num_keys())
        dist.barrier()
    return counts


def test_many_meetings_leave_few_keys():
    for counts in run_ranks(keys_left, 2):
        assert counts[-1] <= counts[2] + 2


def meet_alone(rank, world):
    return Rendezvous(dist.group.WORLD, "here", 0.01).meet("company")


def test_one_rank_needs_no_company():
    assert run_ranks(meet_alone, 1) == [True]


def limits_with(port):
    """In milliseconds, of this process's connections with a port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.getpeername()[1] == port:
                    found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        except (OSError, IndexError):  # no socket, or one that listens
            continue
    return found


@pytest.mark.parametrize(("seconds", "limit"), [(7.0, 7000), (1e12, 2**31 - 1)])
def test_a_store_that_says_nothing_is_given_up(seconds, limit):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert limits_with(store.port) == [0], "as long as the system likes"
    limit_silence(store, seconds)
    assert limits_with(store.port) == [limit]
    store.set("still", "there")


def test_a_store_in_a_file_cannot_be_cut_off(tmp_path):
    limit_silence(dist.FileStore(str(tmp_path / "store"), 1), 1.0)
