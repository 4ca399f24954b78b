"""Several pytest processes that share the files of one run: `pytest --at-once 2`.

Ranks of a test mostly wait for each other, and leave cores idle that another file's could use. Each
process takes the next file that nobody has taken, and runs all its tests. The first process, which
the user has started, starts the others, prints what they print, and fails where one of them does.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest


def add_options(parser):
    parser.addoption(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="run the files in this many processes",
    )
    parser.addoption("--share-of", type=Path, help="where the processes note who takes which file")


def register(config):
    """Has this process share the files with others, if it was asked to."""
    options = config.option
    if options.share_of is not None:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
        config.pluginmanager.register(Share(options.share_of))
    elif options.at_once > 1 and not options.collectonly:
        config.pluginmanager.register(Others(config))


def end_with(parent):
    """Ends this process once its parent has ended, however that was."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Share:
    """Leaves tests of files to other processes that have taken them before."""

    def __init__(self, folder):
        self.folder = folder
        self.mine = {}  # files, and whether this process has taken them

    def takes(self, file):
        note = self.folder / str(file).replace("/", "-")
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if item.path not in self.mine:
            self.mine[item.path] = self.takes(item.path)
        if not self.mine[item.path]:
            return True  # which says that it has been run
        if nextitem is not None and nextitem.path != item.path:
            # The next file may be another process's: keep no fixture or folder open for it.
            return item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        return None


class Others:
    """The processes beside the first one."""

    def __init__(self, config):
        self.folder = tempfile.TemporaryDirectory(prefix="fastsync-tests-")
        folder = Path(self.folder.name)
        config.pluginmanager.register(Share(folder))
        self.logs = [folder / f"{n}.log" for n in range(1, config.option.at_once)]
        self.processes = [self.start(config, log) for log in self.logs]
        self.failed = False

    def start(self, config, log):
        command = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
        # One word: pytest takes a second one for a path until it knows the option.
        command += [f"--share-of={self.folder.name}"]
        seconds = config.option.seconds_to
        if seconds is not None:
            command += [f"--seconds-to={seconds}.{log.stem}"]
        with log.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=os.getcwd())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        """Whether all have passed is known once the others have ended."""
        codes = [process.wait() for process in self.processes]
        if worst := next(filter(None, codes), 0):
            session.exitstatus = session.exitstatus or worst

    def pytest_terminal_summary(self, terminalreporter):
        for process, log in zip(self.processes, self.logs, strict=True):
            terminalreporter.section(f"process {log.stem}, which ended with {process.poll()}")
            terminalreporter.write(log.read_text(errors="replace"))
            terminalreporter.section("this process")

    def pytest_unconfigure(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.folder.cleanup()
