"""Trainings that a launcher starts and a test signals."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

from fastsync._torch import TCPStore
from tests.helpers.scripts import ROOT, Forked, environment
from tests.helpers.served_store import environment_of

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


class ForkedJob(Job):
    """The same without a launcher, and ranks that need not import torch."""

    def __init__(self, folder, ranks, module, *arguments):
        self.folder, self.ranks = folder, range(ranks)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {**environment_of(self._store.port), "WORLD_SIZE": str(ranks)}
        self.forked = [
            Forked(module, folder, *arguments, variables={**place, "RANK": str(rank)})
            for rank in self.ranks
        ]

    @property
    def text(self):
        return "".join(rank.output for rank in self.forked)

    @property
    def over(self):
        return all(rank.returncode is not None for rank in self.forked)

    def end(self):
        return "".join(rank.communicate(100)[0] for rank in self.forked)

    def kill(self):
        for rank in self.forked:
            rank.kill()


@contextmanager
def launched(folder, ranks, module, *arguments, kind=Job, **options):
    """A `Job` that has ended afterwards, in any case."""
    job = kind(folder, ranks, module, *arguments, **options)
    try:
        yield job
    finally:
        job.kill()


def leave_process_number(folder, rank):
    """Leave this process's number: the first act of each rank of a job."""
    (folder / f"process {rank}").write_text(str(os.getpid()))
