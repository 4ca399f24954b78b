"""Runs the commands of examples/ and docs/ the way a user types them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def environment():
    """This process's environment with the checkout importable and without a rank's place."""
    kept = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    return kept | {"PYTHONPATH": str(ROOT)}


def start(module, *arguments):
    """Starts `python -m module arguments` in the checkout; its output is one text."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process, code=0, timeout=240):
    """Waits for the exit code `code` and returns what was printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def finish_all(processes):
    """Waits for processes of one job, and returns what each printed; one that fails ends all."""
    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = [pool.submit(finish, process) for process in processes]
        try:
            for output in as_completed(outputs):
                output.result()
        finally:
            for process in processes:
                process.kill()
    return [output.result() for output in outputs]


def run_module(module, *arguments, code=0):
    """Runs `python -m module arguments` to its end and returns what it printed."""
    return finish(start(module, *arguments), code)
