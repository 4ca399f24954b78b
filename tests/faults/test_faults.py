"""Real ranks that die, stop, sleep, raise and leave, and what the others say of it."""

import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.faults.fault_endings import Ending, check, name_of
from tests.helpers.scripts import ROOT, asked_for, environment, run_jobs
from tests.helpers.served_store import environment_of

# Fault, where, wrapper, ranks.
DEATHS = [
    ("kill", "backward", "fp32", 3),
    ("kill", "wrap", "fp32", 3),
    ("kill", "forward", "int8", 4),
    ("kill", "between", "zero2", 2),
    ("exit", "backward", "fp32", 4),
    ("exit", "forward", "zero2", 4),
    ("exit", "wrap", "int8", 3),
    ("fade", "backward", "fp32", 2),
    ("fade", "checkpoint", "zero2", 3),
    ("kill", "arrived", "fp32", 3),
    ("exit", "arrived", "zero1", 2),
    ("kill", "unlinked", "int8", 3),
    ("exit", "unlinked", "int8", 2),
    ("kill", "connect", "fsdp", 2),
    ("exit", "connect", "zero3", 3),
    ("kill", "groups", "int8", 3),
    ("kill", "vote", "fp32", 4),
    ("exit", "vote", "zero1", 3),
    ("kill", "checkpoint", "zero1", 4),
    ("exit", "checkpoint", "zero2", 2),
    ("kill", "fetch", "zero1", 3),
    ("exit", "fetch", "zero2", 2),
    ("kill", "pieces", "codec", 3),
    ("kill", "pieces", "int8", 3),
    ("kill", "pieces", "zero1", 3),
    ("exit", "pieces", "codec", 4),
]
RAISES = [
    ("raise", "forward", "fp32", 3),
    ("raise", "backward", "fp32", 4),
    ("raise", "between", "int8", 2),
    ("raise", "wrap", "fp32", 2),
    ("raise", "wrapped", "fsdp", 3),
    ("raise", "wrapped", "zero1", 2),
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
# Named at the next forward, which tells a rank that some of its gradients have been sent.
HALF_SKIPS = [("skip", "backward", "int8", 2), ("skip", "backward", "zero2", 3)]
STALLS = [
    ("stop", "backward", "fp32", 3),
    ("sleep", "forward", "fp32", 3),
    ("sleep", "between", "zero1", 2),
    ("stop", "forward", "int8", 2),
    ("stop", "between", "zero2", 4),
    ("sleep", "backward", "zero2", 4),
    ("sleep", "backward", "int8", 3),
    ("stop", "pieces", "codec", 3),
    ("sleep", "pieces", "codec", 3),
    ("sleep", "wrap", "fp32", 3),
    ("stop", "wrap", "int8", 2),
    ("sleep", "groups", "int8", 3),
    ("sleep", "vote", "fp32", 3),
    ("stop", "pieces", "zero2", 3),
    ("stop", "vote", "fp32", 3),
    ("sleep", "skips", "skips", 3),
    ("sleep", "checkpoint", "zero1", 4),
    ("stop", "checkpoint", "zero1", 3),
    ("stop", "fetch", "zero2", 3),
]
# Before the fault watch is open.
ABSENCES = [
    ("sleep", "before", "fp32", 3),
    ("stop", "before", "zero1", 2),
    ("kill", "before", "fp32", 3),
]
# Where the rendezvous store knows which ranks have come.
MEETINGS = [
    ("sleep", "nonfinite", "finite", 3),
]
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
# By the rank that needs it, and the others repeat it. A training in between needs none.
NO_STORE = [
    ("store", "wrap", "fp32", 3),
    ("store", "wrap", "zero1", 2),
    ("store", "vote", "int8", 2),
    ("store", "checkpoint", "zero2", 4),
    ("store", "backward", "fp32", 2),
]
UNITS = [
    ("kill", "backward", "zero3", 3),
    ("raise", "forward", "zero3", 2),
    ("fewer", "loop", "zero3", 2),
    ("stop", "forward", "fsdp", 2),
    ("sleep", "backward", "zero3", 3),
]
BLIND = [("kill", "forward", "blind3", 2), ("sleep", "backward", "blind3", 2)]
JOBS = [
    *(*DEATHS, *RAISES, *LEAVES, *HALF_SKIPS, *STALLS, *ABSENCES, *MEETINGS),
    *(*ALIKE, *THAWS, *NO_STORE, *UNITS, *BLIND),
]


@pytest.fixture(scope="module")
def endings(tmp_path_factory, request):
    """Return how each job that a test of this run asks for has ended."""
    wanted = asked_for(request, "job")
    folder = tmp_path_factory.mktemp("faults")
    stuck = {}
    for _, said in run_jobs("tests.faults.fault_script", folder, wanted, timeout=900):
        stuck |= said
    return {job: Ending(folder, job, stuck[name_of(job)]) for job in wanted}


@pytest.mark.slow(
    but=(
        "kill-backward-fp32-3",
        "exit-fetch-zero2-2",
        "raise-forward-fp32-3",
        "fewer-loop-fp32-3",
        "sleep-backward-int8-3",
        "settings-wrap-fp32-2",
        "kill-backward-zero3-3",
    )
)
@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_every_other_rank_says_what_has_happened_where(endings, job):
    check(job, endings[job])


@pytest.mark.slow
def test_a_rank_that_dies_right_after_its_last_report_is_not_placed_in_an_earlier_step():
    """It has said that step 1 is over, and steps 2 to 5 take less time than a report's turn."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": "3", **environment_of(store.port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.killed_script"],
            cwd=ROOT,
            env={**environment(), **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    for text in (texts[0], texts[2]):
        [place] = re.findall(r"fastsync: rank 1 was killed by SIGKILL (.*?)\. Rank", text)
        earlier = r"in step 6 \(0\.\d s earlier it was .*step [1-5]\b.*\)"
        assert re.fullmatch(rf"{earlier}|after step 5|in the backward of step 6.*", place), text
