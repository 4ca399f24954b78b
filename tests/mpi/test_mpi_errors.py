"""How jobs end that go wrong: all ranks, with a line that names the rank and the reason."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.mpi import jobs


def ended(how, ranks=2):
    """Return the end of a job that would wait for ever if the others did not hear of the fault."""
    job = jobs.mpirun(ranks, "-m", "tests.mpi.ending", how, timeout=120)
    return job.code, job.text


# The exit code, and what is printed, by what happens.
ENDS = {
    "in_model": (1, r"rank 1 ends all ranks: ValueError: a bad batch \(ending.py:\d+ in in_model"),
    "raises": (1, r"rank 1 ends all ranks: ValueError: a bad batch \(ending.py:\d+ in raises"),
    "interrupted": (130, r"rank 1 ends all ranks: KeyboardInterrupt"),
    "exits": (1, r"rank 1 has ended, and this rank waits for it in all_reduce \(add\) of 3 Float"),
    "sizes": (1, r"all_reduce \(add\) of 4 Float: others call something else, or with other sizes"),
    "messages": (1, r"recv from rank 1 of 5 Float: rank 1 has sent 12 bytes, not the 20 expected"),
    "kinds": (1, r"broadcast from rank 0 of 3 Float: others call something else"),
    "waits": (1, r"rank 1 has ended, and this rank waits for it in all_reduce"),
    "late": (1, r"rank 0 of 2: all_reduce \(add\) of 3 Float: timeout after 1 s"),
    "premultiplied": (1, r"ValueError: fastsync_mpi has no premultiplied sum"),
    "fp8": (1, r"ValueError: fastsync_mpi has no add of Float8_e4m3fn"),
    "sparse": (1, r"ValueError: fastsync_mpi carries dense CPU tensors, but this one is sparse"),
    "elastic": (1, r"elastic does not go with a process group whose CPU tensors Gloo does not"),
}


@pytest.mark.slow(but=("in_model", "exits"))
@pytest.mark.parametrize("how", ENDS)
def test_all_ranks_end(how):
    code, text = ended(how)
    due, words = ENDS[how]
    assert code == due and re.search(words, text), text


@pytest.mark.slow
def test_a_killed_rank_ends_the_job():
    code, text = ended("killed")
    assert code == 9 and "EXIT CODE: 9" in text, text


@pytest.mark.slow
def test_a_rank_that_has_done_its_part_may_leave():
    code, text = ended("slow", ranks=3)
    assert code == 0 and "rank 1 has [3.0, 3.0, 3.0]" in text, text


@pytest.mark.slow
def test_ctrl_c():
    arguments = [jobs.command(), "-n", "2", sys.executable, "-m", "tests.mpi.ending", "stuck"]
    process = subprocess.Popen(
        arguments,
        env=jobs.environment(),
        cwd=jobs.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    text = ""
    while text.count("waits") < 2:
        line = process.stdout.readline()
        assert line, text
        text += line
    os.killpg(process.pid, signal.SIGINT)
    text += process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "ends all ranks: KeyboardInterrupt" in text, text


def alone(code, **changes):
    """Python without mpirun."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=jobs.environment(**changes),
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


INIT = "import torch.distributed as d, fastsync.mpi; d.init_process_group('fastsync_mpi'); "


@pytest.mark.slow
def test_without_mpirun_there_is_one_rank():
    found = alone(INIT + "print(d.get_rank(), d.get_world_size()); d.destroy_process_group()")
    assert (found.returncode, found.stdout) == (0, "0 1\n"), found.stderr
    assert "no mpirun has started this process: it is rank 0 of 1" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (
            "import sys; sys.modules['mpi4py'] = None",
            "ImportError: fastsync.mpi needs mpi4py: pip install 'fastsync[mpi]'",
        ),
        (  # which mpi4py's wheels look for when they are imported
            "import os; os.environ['MPI4PY_LIBMPI'] = '/none/libmpi.so'",
            "ImportError: fastsync.mpi finds no MPI library: load the cluster's MPI module, or pip",
        ),
        (
            "import mpi4py; mpi4py.rc.thread_level = 'serialized'",
            "RuntimeError: fastsync.mpi needs an MPI that has begun with MPI_THREAD_MULTIPLE",
        ),
    ],
)
def test_what_cannot_be_used_is_said(prepare, words):
    found = alone(f"{prepare}; import fastsync.mpi")
    assert found.returncode == 1 and found.stderr.splitlines()[-1].startswith(words), found.stderr


@pytest.mark.slow
def test_torchrun_without_mpirun_is_refused():
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    store = "store=d.HashStore(), rank=1, world_size=2"
    found = alone(INIT.replace("'fastsync_mpi'", f"'fastsync_mpi', {store}"), **names)
    words = "ValueError: torch.distributed was told rank 1 of 2, but MPI says 0 of 1"
    assert found.returncode == 1 and words in found.stderr, found.stderr
