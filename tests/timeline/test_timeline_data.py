"""Figures from marks: exposed time, overlap, stragglers; and files that are wrong."""

import json
import time
from dataclasses import replace
from unittest import mock

import pytest

from fastsync._torch import default_group, group_store
from fastsync.faults.clocks import ClockOffset, Mailbox, align_clocks, clock_name
from fastsync.testing import run_ranks
from fastsync.timeline import recorder
from fastsync.timeline.data import (
    BucketInfo,
    Run,
    by_step,
    find_slow_ranks,
    load,
    steps_of,
)
from fastsync.timeline.views import summary_text
from tests.timeline.recordings import MS, made_up_run, record, step_events


def one_step(buckets, **more):
    return steps_of(0, step_events(7, 100, buckets, **more))[7]


def test_times_of_a_step():
    step = one_step([(20, 21, 21, 35), (40, 45, 45, 58)])
    assert step.computing == pytest.approx(0.050)
    assert step.exposed == pytest.approx(0.010)
    assert step.communicating == pytest.approx(0.014 + 0.013)
    assert step.overlapped == pytest.approx(0.014 + 0.005)
    assert (step.start, step.end) == (100 * MS, 160 * MS)


def test_collectives_at_the_same_time_count_once():
    step = one_step([(20, 20, 20, 40), (20, 20, 30, 45), (20, 20, 45, 48)])
    assert step.communicating == pytest.approx(0.028)


def test_a_step_that_sends_nothing_exposes_nothing():
    assert one_step([]).exposed == 0
    assert one_step([]).communicating == 0


def test_incomplete_steps_are_left_out():
    whole = step_events(1, 0, [(20, 21, 21, 35)])
    cut = step_events(2, 100, [(20, 21, 21, 35)])[:-1]
    headless = step_events(0, 0, [(20, 21, 21, 35)])[3:]
    assert list(steps_of(0, [*headless, *whole, *cut])) == [1]


def test_a_bucket_that_never_completed_is_left_out():
    events = [e for e in step_events(1, 0, [(20, 21, 21, 35)] * 2) if e[1:3] != ("done", 1)]
    assert [b.bucket for b in steps_of(0, events)[1].buckets] == [0]


def test_the_marks_of_a_failed_backward_give_way():
    failed = step_events(1, 0, [(20, 21, 21, 35)])[:4]
    step = steps_of(0, [*failed, *step_events(1, 500, [(20, 21, 21, 35)])])[1]
    assert step.backward_start == 510 * MS
    assert step.buckets[0].ready == 520 * MS


def test_several_forwards_belong_to_one_step():
    first = [(1, "forward_start", 1, 0, 0), (1, "forward_end", 1, 0, 5 * MS)]
    step = steps_of(0, [*first, *step_events(1, 20, [])])[1]
    assert step.forwards == ((0, 5 * MS), (20 * MS, 30 * MS))
    assert step.computing == pytest.approx(0.055)


def test_the_straggler_is_named():
    slow = find_slow_ranks(by_step(made_up_run(late=8)))
    assert (slow.ranks, slow.slow) == ((1,), "backward")
    assert (slow.cost, slow.share) == (pytest.approx(0.008), pytest.approx(0.08))


def late_run(where, steps=4):
    """Three ranks; the last takes 20 ms longer somewhere, the others wait for it."""
    late = {"between steps": (20, 20, 0), "forward": (0, 20, 0), "backward": (0, 0, 20)}
    before, forward, backward = late.get(where, (0, 0, 0))
    ranks = []
    for rank in range(3):
        mine = rank == 2
        events = []
        for number in range(steps):
            at = 100 * number + mine * before
            begin = 10 + mine * (forward - before)
            ready = begin + 10 + mine * backward
            packed = ready + (21 if mine and where == "packing" else 1)
            done = 100 * number + 45 - at
            events += step_events(
                number, at, [(ready, packed, packed, done)], (begin, packed + 1), done
            )
        ranks.append(record(rank, events))
    return Run("Net", 3, "gloo", "cpu", "2", ((BucketInfo(("w",), 1, "float32"),),), tuple(ranks))


@pytest.mark.parametrize("where", ["between steps", "forward", "backward", "packing"])
def test_what_the_straggler_is_slow_with(where):
    run = late_run(where)
    slow = find_slow_ranks(by_step(run))
    assert (slow.ranks, slow.slow) == ((2,), where)
    assert slow.excess[where] == pytest.approx(0.02)
    named = where if where == "between steps" else f"in {where}"
    assert "straggler      rank 2, for 20.0 ms (" in summary_text(run)
    assert f"of each step: it takes 20.0 ms longer {named}" in summary_text(run)


def test_no_straggler_that_costs_little():
    run = made_up_run(late=0.1)
    assert find_slow_ranks(by_step(run)) is None
    assert "none: no rank keeps the others waiting" in summary_text(run)


def test_only_steps_that_all_ranks_have():
    run = made_up_run(steps=3)
    short = record(1, [e for e in run.ranks[1].events if e[0] != 2])
    cut = type(run)(**{**vars(run), "ranks": (run.ranks[0], short)})
    assert list(by_step(cut)) == [0, 1]


def test_a_run_survives_its_file(tmp_path):
    run = made_up_run(late=3)
    run.dump(tmp_path / "deep" / "run.json")
    assert load(tmp_path / "deep" / "run.json") == run


def test_what_is_not_there_is_said(tmp_path):
    """Whichever way the marks travel."""
    run = made_up_run()
    assert "incomplete" not in summary_text(run)
    first = replace(run.ranks[0], dropped=7)
    second = recorder._unpacked(recorder._packed(replace(run.ranks[1], unfinished=5)).encode())
    replace(run, ranks=(first, second)).dump(tmp_path / "run.json")
    found = load(tmp_path / "run.json")
    assert [(r.dropped, r.unfinished) for r in found.ranks] == [(7, 0), (0, 5)]
    assert "the first 7 marks of rank 0 were overwritten" in summary_text(found)
    assert "5 marks of rank 1 lack: its device had not come to them" in summary_text(found)


@pytest.mark.slow(but=("nonsense-is not JSON",))
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "not a timeline"),
        ('{"traceEvents": []}', "not a timeline"),
        ('{"format": "fastsync timeline", "version": 99}', "format version 99"),
        ('{"format": "fastsync timeline", "version": 2}', "format version 2"),
        ('{"format": "fastsync timeline", "version": 3}', "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "x.json")


def test_the_file_is_plain_json(tmp_path):
    made_up_run().dump(tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["format"] == "fastsync timeline"
    assert document["ranks"][1]["events"][0] == [0, "forward_start", 1, 0, 0]


# --- Clocks of different machines, played by ranks that give their clock another name and shift it


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
