"""Runs the commands of examples/ and docs/ the way a user types them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def environment():
    """This process's environment with the checkout importable and without a rank's place."""
    kept = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    # A script that asks for GPUs in another way cannot use them in processes that it forks.
    return kept | {"PYTHONPATH": str(ROOT), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def start(module, *arguments):
    """Start `python -m module arguments` in the checkout; its output is one text."""
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
    """Wait for the exit code `code` and return what was printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def finish_all(processes, timeout=240):
    """Wait for processes of one job, and return what each printed; one that fails ends all."""
    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = [pool.submit(finish, process, timeout=timeout) for process in processes]
        try:
            for output in as_completed(outputs):
                output.result()
        finally:
            for process in processes:
                process.kill()
    return [output.result() for output in outputs]


def run_jobs(module, folder, jobs, timeout, at_once=3):
    """Run `python -m module folder JOBS` for shares of the jobs, whose ranks mostly wait.

    Args:
        jobs: a list that JSON can hold.
        at_once: how many processes share the jobs.

    Returns:
        Of each process its jobs, and the last line that it printed, read as JSON.
    """
    shares = [jobs[first::at_once] for first in range(min(at_once, len(jobs)))]
    processes = [start(module, folder, json.dumps(share)) for share in shares]
    outputs = finish_all(processes, timeout)
    said = [json.loads(output.splitlines()[-1]) for output in outputs]
    return list(zip(shares, said, strict=True))


def asked_for(request, parameter):
    """The values of a parameter for which this run has tests in the file of a fixture's users."""
    ours = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in ours if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[parameter] for params in given if parameter in params))


def cases_asked_for(request, cases, parameter="case"):
    """Return the cases, by name, that a test of this run asks for."""
    return {name: cases[name] for name in asked_for(request, parameter) if name in cases}


def run_module(module, *arguments, code=0):
    """Run `python -m module arguments` to its end and return what it printed."""
    return finish(start(module, *arguments), code)
