"""GPUs that several processes use at the same time: by an MPS daemon of this command's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.common.ranks import mps_control

DAEMON = "nvidia-cuda-mps-control"
STARTS, TRIED, ENDS = 10.0, 45.0, 5.0  # seconds that each may take: with them no hang costs 90
# In many containers a daemon starts that no program can reach.
TRIAL = (sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')")


@contextlib.contextmanager
def shared_gpus(wanted: bool, output: int) -> Iterator[dict[str, str]]:
    """Yield variables for programs that share a GPU while the context lasts.

    None if that is not wanted, if the daemon's program is missing or does not work, and if another
    daemon is running already. `output`: the file that all of this writes to.
    """
    if not wanted or shutil.which(DAEMON) is None or mps_control().exists():
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        found = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        how: Any = {"env": os.environ | found, "start_new_session": True}
        how |= {"stdout": output, "stderr": subprocess.STDOUT}
        daemon = subprocess.Popen((DAEMON, "-f"), stdin=subprocess.DEVNULL, **how)
        try:
            end = time.monotonic() + STARTS
            while not (there := Path(folder, "control").exists()) and daemon.poll() is None:
                if time.monotonic() > end:
                    break
                time.sleep(0.1)
            yield found if there and _ends_well(TRIAL, TRIED, how) else {}
        finally:
            try:
                _ends_well((DAEMON,), ENDS, how, b"quit\n")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(ENDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGKILL)  # what it has started, too
                daemon.wait()


def _ends_well(command: Sequence[str], seconds: float, how: Any, said: bytes = b"") -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, input=said, timeout=seconds, check=False, **how)
        return done.returncode == 0
    return False
