"""Clocks of different machines, played by ranks that give their clock another name and shift it."""

import time
from unittest import mock

import pytest

from fastsync._torch import default_group, group_store
from fastsync.faults.clocks import ClockOffset, Mailbox, align_clocks, clock_name
from fastsync.testing import run_ranks

SECOND = 1_000_000_000


def align(rank, world, clocks, shifts):
    mail = Mailbox(group_store(default_group()), "test", timeout=30)
    true = time.monotonic_ns
    with mock.patch("time.monotonic_ns", lambda: true() + shifts[rank]):
        return align_clocks(mail, rank, world, clocks[rank])


def test_ranks_of_one_machine_share_a_clock():
    for offsets in run_ranks(align, 2, ["", ""], [0, 0]):
        assert offsets == [ClockOffset(0, 0)] * 2
    assert clock_name() == clock_name() != ""


def test_the_true_offset_lies_within_the_error():
    shifts = [0, 0, 5 * SECOND, 5 * SECOND]
    answers = run_ranks(align, 4, ["a", "a", "b", "b"], shifts)
    assert all(answer == answers[0] for answer in answers)
    for offset, shift in zip(answers[0], shifts, strict=True):
        assert abs(offset.offset_ns + shift) <= offset.error_ns
    assert answers[0][1].error_ns == 0 < answers[0][2].error_ns < SECOND


def some_come(rank, world, coming):
    if rank not in coming:
        return None
    mail = Mailbox(group_store(default_group()), "absent", timeout=4)
    try:
        return align_clocks(mail, rank, world)
    except RuntimeError as error:
        return str(error)


def test_a_rank_that_does_not_come():
    here = ClockOffset(0, 0)
    assert run_ranks(some_come, 3, [0, 2]) == [[here, None, here], None, [here, None, here]]


@pytest.mark.slow
def test_rank_zero_does_not_come():
    _, second, third = run_ranks(some_come, 3, [1, 2])
    assert "leaders" in second and "leaders" in third


def leave_after_saying_hello(rank, world):
    mail = Mailbox(group_store(default_group()), "gone", timeout=1)
    if rank == 1:
        return mail.put("clock/1", "another clock")
    return align_clocks(mail, rank, world)


def test_a_rank_that_leaves_before_it_asks():
    assert run_ranks(leave_after_saying_hello, 2) == [[ClockOffset(0, 0), None], None]


def send_late(rank, world):
    mail = Mailbox(group_store(default_group()), "late", timeout=0)
    if rank == 1:
        mail.put("letter", "hello")
    default_group().barrier().wait()
    return mail.read("letter").decode()


def test_what_is_there_is_read_after_the_deadline_too():
    assert run_ranks(send_late, 2) == ["hello"] * 2
