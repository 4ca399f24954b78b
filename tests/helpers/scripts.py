"""Runs the commands of examples/ and docs/ the way a user types them."""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fastsync.testing import ranks

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


class Forked:
    """`python -m module arguments` as `start` gives it, in a process that need not import torch.

    Not for what a process does at its very end: it ends without finalising the interpreter.

    Args:
        variables: what its environment has besides.
        first: a function of a module, and its arguments, that the process calls before.
    """

    def __init__(self, module, *arguments, variables=None, first=()):
        self._folder = tempfile.TemporaryDirectory(prefix="fastsync-forked-")
        self._output = Path(self._folder.name, "output")
        variables = {**environment(), **(variables or {})}
        job = (module, [*map(str, arguments)], self._output, variables, first)
        self._process = ranks._context().Process(target=_become, args=job)
        self._process.start()

    def communicate(self, timeout):
        """Return what it has printed, once it has ended."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.output, None

    @property
    def output(self):
        """Return what it has printed by now."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def returncode(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def _become(module, arguments, output, variables, first):
    """Run a module to the end of this process, and of those that it forks."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    if first:
        call, *given = first
        call(*given)
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException as error:
        code = (error.code or 0) if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            sys.excepthook(*sys.exc_info())
        elif not isinstance(code, int):  # as the interpreter does
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


def run_jobs(module, folder, jobs, timeout, at_once=3, start=Forked):
    """Run `python -m module folder JOBS` for shares of the jobs, whose ranks mostly wait.

    Args:
        jobs: a list that JSON can hold.
        at_once: how many processes share the jobs.
        start: begins a process.

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
