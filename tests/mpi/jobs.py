"""Starts ranks with mpirun, as a user does."""

import faulthandler
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROM_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@cache
def missing():
    """Return why MPI cannot be used here; empty if it can."""
    found = subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True
    )
    if found.returncode:
        return f"mpi4py cannot be used: {found.stderr.strip().splitlines()[-1]}"
    return "" if command() else "there is no mpirun"


def command():
    """The mpirun beside this Python, else the machine's."""
    return shutil.which(
        "mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )


def environment(**changes):
    known = {name: value for name, value in os.environ.items() if name not in FROM_LAUNCHERS}
    paths = [str(ROOT), *filter(None, [known.get("PYTHONPATH")])]
    return known | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | changes


@dataclass
class Ended:
    code: int
    text: str
    seconds: float


def started(ranks, *arguments, **changes):
    """`mpirun -n ranks python arguments`, with its output in one pipe."""
    return subprocess.Popen(
        [command(), "-n", str(ranks), sys.executable, *arguments],
        env=environment(**changes),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def mpirun(ranks, *arguments, timeout=240, **changes):
    begun = time.monotonic()
    process = started(ranks, *arguments, **changes)
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"mpirun did not end within {timeout} s:\n{text}") from None
    return Ended(process.returncode, text, time.monotonic() - begun)


def run_ranks(function, ranks, *arguments, timeout=240, **changes):
    """Return what `function(rank, world, *arguments)` returns on each rank,
    over the default group.
    """
    with tempfile.TemporaryDirectory(prefix="fastsync-mpi-") as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((function, arguments)))
        ended = mpirun(ranks, "-m", "tests.mpi.jobs", folder, timeout=timeout, **changes)
        assert ended.code == 0, ended.text
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]


def main(folder):
    """Run the job in a rank, which says where it is if it hangs."""
    faulthandler.dump_traceback_later(200)
    import torch
    import torch.distributed as dist

    import fastsync.mpi

    torch.set_num_threads(1)
    dist.init_process_group(fastsync.mpi.NAME)
    function, arguments = pickle.loads(Path(folder, "job").read_bytes())
    rank = dist.get_rank()
    result = function(rank, dist.get_world_size(), *arguments)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
