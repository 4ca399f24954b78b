"""Trainings that torchrun starts and a test signals."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

from tests.scripts import ROOT, environment

LONGEST = 120  # seconds that a job may take to get anywhere


class Job:
    """A module that torchrun runs on some ranks; each leaves its process number in the folder.

    Attributes:
        output: what all have printed, torchrun too.
        launcher: torchrun.
    """

    def __init__(self, folder, ranks, module, *arguments, options=()):
        self.folder, self.ranks = folder, range(ranks)
        self.output = folder / "output"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), *options, "-m", module, str(folder)]
        with self.output.open("w") as file:
            self.launcher = subprocess.Popen(
                [*command, *map(str, arguments)],
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self):
        return self.output.read_text()

    def process(self, rank):
        return int((self.folder / f"process {rank}").read_text())

    def wait_until(self, condition):
        deadline = time.monotonic() + LONGEST
        while not condition():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def wait_for_files(self, *names):
        self.wait_until(lambda: all((self.folder / name).exists() for name in names))

    def wait_for_text(self, words):
        self.wait_until(lambda: words in self.text)

    def end(self):
        """Returns all output. Torchrun kills ranks that have not ended after 30 seconds."""
        self.launcher.wait(timeout=100)
        return self.text

    def has_ended(self, rank):
        return not os.path.exists(f"/proc/{self.process(rank)}")

    def kill(self):
        self.launcher.kill()
        self.launcher.wait()
        for file in self.folder.glob("process *"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


@contextmanager
def launched(folder, ranks, module, *arguments, options=()):
    """A job that has ended afterwards, in any case."""
    job = Job(folder, ranks, module, *arguments, options=options)
    try:
        yield job
    finally:
        job.kill()


def leave_process_number(folder, rank):
    """What each rank of a job does first."""
    (folder / f"process {rank}").write_text(str(os.getpid()))
