"""Real ranks that die, stop, sleep, raise and leave, and what the others say of it."""

import json
import re
from pathlib import Path

import pytest

from tests.fault_script import AT, FAULTY, LAYERS, STEPS
from tests.scripts import asked_for, run_jobs

# Fault, where, wrapper, ranks.
DEATHS = [
    ("kill", "forward", "fp32", 2),
    ("kill", "backward", "fp32", 3),
    ("kill", "between", "fp32", 3),
    ("kill", "wrap", "fp32", 3),
    ("kill", "forward", "int8", 4),
    ("kill", "backward", "int8", 3),
    ("kill", "backward", "zero1", 3),
    ("kill", "forward", "zero2", 3),
    ("kill", "between", "zero2", 2),
    ("exit", "backward", "fp32", 4),
    ("exit", "forward", "zero2", 4),
    ("exit", "wrap", "int8", 3),
    ("fade", "backward", "fp32", 2),
    ("fade", "checkpoint", "zero2", 3),
    ("kill", "arrived", "fp32", 3),
    ("kill", "arrived", "fp32", 4),
    ("exit", "arrived", "zero1", 2),
    ("kill", "unlinked", "int8", 3),
    ("exit", "unlinked", "int8", 2),
    ("kill", "connect", "fsdp", 2),
    ("exit", "connect", "zero3", 3),
    ("kill", "groups", "int8", 3),
    ("kill", "vote", "fp32", 4),
    ("kill", "vote", "int8", 2),
    ("exit", "vote", "zero1", 3),
    ("kill", "checkpoint", "zero1", 4),
    ("exit", "checkpoint", "zero2", 2),
    ("kill", "pieces", "codec", 3),
    ("exit", "pieces", "codec", 4),
]
RAISES = [
    ("raise", "forward", "fp32", 3),
    ("raise", "backward", "fp32", 4),
    ("raise", "between", "int8", 2),
    ("raise", "wrap", "fp32", 2),
    ("raise", "wrapped", "fsdp", 3),
    ("raise", "wrapped", "zero1", 2),
    ("raise", "backward", "zero1", 2),
    ("raise", "forward", "zero2", 4),
    ("raise", "groups", "int8", 2),
    ("raise", "vote", "fp32", 3),
    ("raise", "checkpoint", "zero2", 3),
    ("raise", "pieces", "codec", 3),
]
LEAVES = [
    ("leave", "forward", "fp32", 3),
    ("leave", "backward", "int8", 2),
    ("fewer", "loop", "fp32", 3),
    ("fewer", "loop", "zero1", 2),
    ("fewer", "loop", "int8", 4),
    ("fewer", "loop", "zero2", 3),
    ("skip", "forward", "fp32", 3),
    ("skip", "forward", "zero1", 4),
]
HALF_SKIPS = [("skip", "backward", "int8", 2), ("skip", "backward", "zero2", 3)]
STALLS = [
    ("stop", "backward", "fp32", 3),
    ("sleep", "forward", "fp32", 3),
    ("sleep", "between", "zero1", 2),
    ("stop", "forward", "int8", 2),
    ("sleep", "forward", "int8", 3),
    ("stop", "between", "zero2", 4),
    ("sleep", "backward", "zero2", 4),
    ("stop", "forward", "zero1", 3),
    ("stop", "pieces", "codec", 3),
    ("sleep", "wrap", "fp32", 3),
    ("sleep", "wrap", "zero1", 3),
    ("sleep", "wrap", "zero2", 2),
    ("stop", "wrap", "int8", 2),
    ("sleep", "groups", "int8", 3),
    ("sleep", "vote", "fp32", 3),
    ("sleep", "vote", "zero1", 2),
    ("stop", "vote", "fp32", 3),
    ("sleep", "skips", "skips", 3),
]
# What the error calls the place where the others wait, and the phase of the rank that is late.
TOGETHER = {
    "wrap": ("the wrapping of the model", "wrapping"),
    "groups": ("the making of a process group (codes)", "wrapping"),
    "vote": ("the vote on a plan", "planning"),
    "skips": (f"the count of the ranks that do not skip step {AT + 1}", "backward"),
}
# Before the ranks look out for each other.
ABSENCES = [
    ("sleep", "before", "fp32", 3),
    ("stop", "before", "zero1", 2),
    ("kill", "before", "fp32", 3),
]
# Where the rendezvous store knows who has come.
MEETINGS = [
    ("sleep", "checkpoint", "zero1", 4),
    ("stop", "checkpoint", "zero1", 3),
    ("sleep", "nonfinite", "finite", 3),
]
# Who sleeps there looks to the others like one that waits.
QUIET_SLEEPS = [("sleep", "pieces", "codec", 3)]
ALIKE = [
    *(
        (fault, "wrap", way, world)
        for fault in ("settings", "shapes", "order")
        for way, world in (("fp32", 2), ("int8", 3), ("zero1", 4), ("zero2", 3))
    ),
    ("nan", "forward", "fp32", 3),
    ("nan", "forward", "zero2", 2),
    ("nan", "backward", "int8", 4),
    ("nan", "backward", "zero1", 3),
]
THAWS = [
    ("thaw", "vote", "fp32", 3),
    ("thaw", "vote", "int8", 2),
    ("thaw", "vote", "zero1", 4),
    ("thaw", "vote", "zero2", 3),
]
NO_STORE = [
    ("store", "wrap", "fp32", 3),
    ("store", "wrap", "zero1", 2),
    ("store", "vote", "int8", 2),
    ("store", "checkpoint", "zero2", 4),
    ("store", "backward", "fp32", 2),
]
UNITS = [
    ("kill", "forward", "zero3", 2),
    ("kill", "backward", "zero3", 3),
    ("kill", "between", "fsdp", 2),
    ("raise", "backward", "fsdp", 3),
    ("raise", "forward", "zero3", 2),
    ("fewer", "loop", "zero3", 2),
    ("stop", "forward", "fsdp", 2),
    ("sleep", "backward", "zero3", 3),
]
BLIND = [("kill", "forward", "blind3", 2), ("sleep", "backward", "blind3", 2)]
JOBS = [
    *(*DEATHS, *RAISES, *LEAVES, *HALF_SKIPS, *STALLS, *ABSENCES, *MEETINGS, *QUIET_SLEEPS),
    *(*ALIKE, *THAWS, *NO_STORE, *UNITS, *BLIND),
]


def name_of(job):
    return "-".join(map(str, job))


class Ending:
    """What the ranks of a job have seen, by rank; None where one could not say."""

    def __init__(self, folder, job, stuck):
        self.stuck = stuck
        files = [Path(folder, f"{name_of(job)}-{rank}.json") for rank in range(job[3])]
        self.ranks = [json.loads(f.read_text()) if f.exists() else None for f in files]
        self.logs = [f.with_suffix(".log").read_text(errors="replace") for f in files]
        self.others = [seen for rank, seen in enumerate(self.ranks) if rank != FAULTY]

    def __str__(self):
        return "\n".join(f"{seen}\n{log}" for seen, log in zip(self.ranks, self.logs, strict=True))


@pytest.fixture(scope="module")
def endings(tmp_path_factory, request):
    """How each job that a test of this run asks for has ended."""
    wanted = asked_for(request, "job")
    folder = tmp_path_factory.mktemp("faults")
    stuck = {}
    for _, said in run_jobs("tests.fault_script", folder, wanted, timeout=900):
        stuck |= said
    return {job: Ending(folder, job, stuck[name_of(job)]) for job in wanted}


def check_named(ending):
    """Every other rank raised the error that names the faulty one, and none hangs."""
    assert set(ending.stuck) <= {FAULTY}, str(ending)
    for seen in ending.others:
        assert seen["error"] == "SyncFault", str(ending)
        assert seen["ranks"] == [FAULTY], str(ending)
        assert f"rank {FAULTY}" in seen["text"], str(ending)


def check_place(job, ending):
    """The others wait for a bucket that the faulty rank has not sent, or not wholly."""
    _, place, wrapper, _ = job
    for seen in ending.others:
        if place in ("forward", "between") and not wrapper.startswith("zero"):
            assert seen["bucket"] == 0, str(ending)
            assert any(f"layers.{LAYERS - 1}" in name for name in seen["parameters"]), str(ending)
        elif place == "backward":
            assert 0 <= seen["bucket"] <= LAYERS, str(ending)
        if place in ("forward", "backward"):
            size = "16.3 KiB" if wrapper == "fp32" else " KiB"  # a layer's, or some of it
            assert f"{size}) of step {AT + 1}" in seen["text"], str(ending)


@pytest.mark.parametrize("job", DEATHS, ids=name_of)
def test_a_death_is_named_on_every_other_rank(endings, job):
    ending = endings[job]
    check_named(ending)
    check_place(job, ending)
    how = "was killed by SIGKILL" if job[0] == "kill" else "exited with code 3"
    for seen in ending.others:
        assert how in seen["reason"] or "ended without a word" in seen["reason"], str(ending)


@pytest.mark.parametrize("job", RAISES, ids=name_of)
def test_the_others_say_why_a_rank_has_left(endings, job):
    ending = endings[job]
    check_named(ending)
    check_place(job, ending)
    for seen in ending.others:
        assert "BadBatch: bad batch (fault_script.py:" in seen["text"], str(ending)
        assert f"rank {FAULTY} raised" in seen["text"], str(ending)


@pytest.mark.parametrize("job", LEAVES, ids=name_of)
def test_a_rank_that_makes_fewer_steps_is_named(endings, job):
    ending = endings[job]
    check_named(ending)
    for seen in ending.others:
        assert f"rank {FAULTY} ended its script" in seen["text"], str(ending)
        assert "join()" in seen["text"], str(ending)


@pytest.mark.parametrize("job", HALF_SKIPS, ids=name_of)
def test_a_rank_that_skips_the_rest_of_a_backward_is_named(endings, job):
    """At its next forward, which tells it that some of its gradients have been sent."""
    ending = endings[job]
    check_named(ending)
    for seen in ending.others:
        assert f"rank {FAULTY} raised" in seen["text"], str(ending)
        assert "the previous backward stopped half-way" in seen["text"], str(ending)


@pytest.mark.parametrize("job", STALLS, ids=name_of)
def test_a_rank_that_stalls_is_named_before_and_at_the_timeout(endings, job):
    ending = endings[job]
    check_named(ending)
    warned = [log for log in ending.logs if "fastsync: rank 0 has waited" in log]
    assert len(warned) == 1, str(ending)
    if job[0] == "sleep":
        assert "in fail" in warned[0], "the stack of the rank that sleeps"
        assert f"rank {FAULTY} is late" in warned[0]
    else:
        assert f"rank {FAULTY} is stopped" in warned[0]
    place, phase = TOGETHER.get(job[1], ("", None))
    for seen in ending.others:
        assert place in seen["text"] and place in warned[0], str(ending)
        assert phase in (None, seen["phase"]), str(ending)
        assert job[0] == "stop" or "in fail" in seen["text"], str(ending)


@pytest.mark.parametrize("job", ABSENCES, ids=name_of)
def test_a_rank_that_does_not_begin_to_wrap_the_model_is_named(endings, job):
    ending = endings[job]
    check_named(ending)
    for seen in ending.others:
        assert f"rank {FAULTY}, which has not begun to wrap a model" in seen["text"], str(ending)
        assert (seen["phase"], seen["reason"]) == ("", "has not come"), str(ending)
    before = [log.partition("Traceback")[0] for log in ending.logs]
    warned = [text for text in before if "fastsync: rank 0 has waited" in text]
    assert len(warned) == (job[0] != "kill"), str(ending)


@pytest.mark.parametrize("job", MEETINGS, ids=name_of)
def test_a_rank_that_does_not_come_to_a_meeting_is_named(endings, job):
    ending = endings[job]
    assert set(ending.stuck) <= {FAULTY}, str(ending)
    for seen in ending.others:
        assert seen["error"] in ("RuntimeError", "SyncFault"), str(ending)
        assert f"ranks [{FAULTY}] did not come" in seen["text"], str(ending)
    if job[0] == "sleep":
        assert f"fastsync:   rank {FAULTY} is late" in ending.logs[0], str(ending)
        assert "in fail" in ending.logs[0], str(ending)


@pytest.mark.parametrize("job", QUIET_SLEEPS, ids=name_of)
def test_who_waits_for_a_rank_that_seems_to_wait_gets_an_error_at_the_timeout(endings, job):
    ending = endings[job]
    assert set(ending.stuck) <= {FAULTY}, str(ending)
    assert all(seen["error"] in ("RuntimeError", "SyncFault") for seen in ending.others)


@pytest.mark.parametrize("job", ALIKE, ids=name_of)
def test_what_all_ranks_can_know_is_the_same_error_on_all(endings, job):
    ending = endings[job]
    assert not ending.stuck, str(ending)
    error = "NonFiniteGradientError" if job[0] == "nan" else "RankMismatchError"
    assert {seen["error"] for seen in ending.ranks} == {error}, str(ending)
    assert all("rank" in seen["text"] and str(FAULTY) in seen["text"] for seen in ending.ranks)


@pytest.mark.parametrize("job", THAWS, ids=name_of)
def test_a_rank_that_trains_others_than_the_rest_is_named(endings, job):
    ending = endings[job]
    assert not ending.stuck, str(ending)
    assert "did not come" in ending.ranks[FAULTY]["text"]
    for seen in ending.others:
        assert seen["error"] == "SyncFault", str(ending)
        assert seen["ranks"] == [FAULTY], str(ending)
        assert "to train the same parameters" in seen["text"], str(ending)


@pytest.mark.parametrize("job", NO_STORE, ids=name_of)
def test_a_store_that_has_gone_is_named_where_it_is_needed(endings, job):
    """By the rank that needs it, and the others repeat it. A training in between needs none."""
    ending = endings[job]
    assert not ending.stuck, str(ending)
    if job[1] == "backward":
        assert all(seen["weights"] == ending.ranks[0]["weights"] for seen in ending.ranks)
        return
    for seen in ending.ranks:
        assert "cannot reach the rendezvous store at 127.0.0.1:" in seen["text"], str(ending)


def check_unit(job, seen, ending):
    """An error tells which unit was waited for, when, and its parameters."""
    step = AT + 1 if job[1] in ("forward", "backward") else AT + 2
    moment = "backward" if job[1] == "backward" else "forward"
    kind = "gather|reduction" if moment == "backward" else "gather"
    params = r"2 parameters, 'layers\.\2\.weight' to 'layers\.\2\.bias', 16\.2 KiB"
    layer = rf"unit 'layers\.(\d)' \({params}\)"
    if job[0] == "fewer":
        step = STEPS
    found = re.search(rf"the ({kind}) of {layer} in the {moment} of step {step}\b", seen["text"])
    assert found, str(ending)
    return [f"layers.{found[2]}.{part}" for part in ("weight", "bias")]


@pytest.mark.parametrize("job", UNITS, ids=name_of)
def test_faults_name_the_unit_that_is_waited_for(endings, job):
    ending = endings[job]
    check_named(ending)
    reasons = {
        "kill": "was killed by SIGKILL",
        "raise": "rank 1 raised BadBatch: bad batch",
        "fewer": "rank 1 ended its script after step 4",
        "stop": "rank 1 is stopped",
        "sleep": "rank 1 is late: it is in the backward of step 3",
    }
    for seen in ending.others:
        assert seen["parameters"] == check_unit(job, seen, ending)
        assert reasons[job[0]] in seen["text"], str(ending)
        assert "join()" not in seen["text"], "which zero=3 does not have"
    if job[0] in ("stop", "sleep"):
        warned = [log for log in ending.logs if "fastsync: rank 0 has waited" in log]
        assert len(warned) == 1 and "of unit 'layers." in warned[0], str(ending)


@pytest.mark.parametrize("job", BLIND, ids=name_of)
def test_errors_of_the_backend_name_the_unit_too(endings, job):
    ending = endings[job]
    assert set(ending.stuck) <= {FAULTY}, str(ending)
    for seen in ending.others:
        assert seen["error"] == "RuntimeError", str(ending)
        assert seen["text"].startswith("fastsync: rank 0, the "), str(ending)
        check_unit(job, seen, ending)
