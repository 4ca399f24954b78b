"""Trainings that a launcher starts and a test signals."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

from tests.helpers.scripts import ROOT, environment

TORCHRUN = ("torch.distributed.run", "--standalone")
ELASTIC = ("fastsync.elastic",)
LONGEST = 120  # seconds that a job may take to get anywhere


class Job:
    """A module that runs on some ranks; each leaves its process number in the folder.

    Args:
        launcher: the module that starts the ranks, and what it is always given.
        options: of that, too.

    Attributes:
        output: what all have printed, the launcher too.
        launcher: its process.
    """

    def __init__(self, folder, ranks, module, *arguments, launcher=TORCHRUN, options=()):
        self.folder, self.ranks = folder, range(ranks)
        self.output = folder / "output"
        command = [sys.executable, "-m", *launcher]
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

    @property
    def over(self):
        return self.launcher.poll() is not None

    def process(self, rank):
        return int((self.folder / f"process {rank}").read_text())

    def wait_until(self, condition):
        deadline = time.monotonic() + LONGEST
        while not condition():
            assert not self.over and time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def wait_for_files(self, *names):
        self.wait_until(lambda: all((self.folder / name).exists() for name in names))

    def wait_for_text(self, words):
        self.wait_until(lambda: words in self.text)

    def end(self):
        """Return all output. Torchrun kills ranks that have not ended after 30 seconds."""
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
def launched(folder, ranks, module, *arguments, **options):
    """A `Job` that has ended afterwards, in any case."""
    job = Job(folder, ranks, module, *arguments, **options)
    try:
        yield job
    finally:
        job.kill()


def leave_process_number(folder, rank):
    """Leave this process's number: the first act of each rank of a job."""
    (folder / f"process {rank}").write_text(str(os.getpid()))
