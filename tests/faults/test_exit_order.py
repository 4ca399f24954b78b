"""Processes that end while threads of Gloo's are at work, and the reducer or the group is freed."""

import itertools
import subprocess
import sys

import pytest

from fastsync.faults import exit_hooks
from tests.helpers.scripts import ROOT, asked_for, environment, run_jobs, start

STEPS = ("destroy", "free", "collect")
ORDERS = [order for length in range(4) for order in itertools.permutations(STEPS, length)]
# Wire, whether all-reduces are under way, and the order. They must not be when the process exits,
# so the group has to be freed before.
FREED = [("destroy", "free", "collect"), ("free", "destroy", "collect")]
JOBS = [("fp32", False, order) for order in ORDERS]
JOBS += [(wire, True, order) for wire in ("fp32", "int8") for order in FREED]


def name_of(job):
    return f"{job[0]} {'late' if job[1] else 'done'} {' '.join(job[2])}"


@pytest.fixture(scope="module")
def endings(tmp_path_factory, request):
    """Return how the two ranks of each job that a test of this run asks for have ended."""
    folder, wanted = tmp_path_factory.mktemp("leaving"), asked_for(request, "job")
    ended = run_jobs("tests.faults.exit_order_script", folder, wanted, 600, start=start)
    return {job: codes for jobs, said in ended for job, codes in zip(jobs, said, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_every_order_of_leaving_ends(endings, job):
    assert endings[job] == [0, 0]


# A tensor that takes the thread that frees it a while, with the GIL in hand.
LEAVES = """
import sys, time
import torch
import torch.distributed as dist
import fastsync

class Slow:
    def __del__(self):
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
model = fastsync.FastDDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
mine = torch.ones(4)
mine.slow = Slow()
dist.all_reduce(mine, async_op=True)
del mine
"""
DESTROYS = LEAVES + "dist.destroy_process_group()\n"


@pytest.mark.slow
@pytest.mark.parametrize("script", [LEAVES, DESTROYS], ids=["leaves", "destroys the group"])
def test_a_thread_that_frees_tensors_ends_before_the_interpreter(script, tmp_path):
    command = [sys.executable, "-c", script, tmp_path]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_a_thread_that_never_rests_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(exit_hooks, "_LONGEST", 0.05)
    monkeypatch.setattr(exit_hooks, "_runs", lambda: asked.append(1) or True)
    exit_hooks.let_threads_finish()
    assert asked
