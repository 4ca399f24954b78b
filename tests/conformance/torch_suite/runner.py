"""Forks the ranks of each test, watches them, and judges."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.conformance.torch_suite.rank import RankResult

__all__ = ["Job", "TestResult", "run_tests"]

_GRACE = 3.0  # seconds that ranks may live on after another one failed
_OUTPUT_SHOWN = 4000


@dataclass(frozen=True)
class Job:
    """One test.

    Attributes:
        run_rank: called in each rank with the rank and a folder, in which it leaves a `RankResult`.
    """

    name: str
    ranks: int
    run_rank: Callable[[int, Path], None]


@dataclass(frozen=True)
class TestResult:
    """How one test ended.

    Attributes:
        status: "passed", "failed", "not run" (skipped, or what is under test was never built),
            "crashed" (a rank died without a word) or "timed out".
        rank: the rank that failed first, or -1.
        text: that rank's traceback, the reason, or the end of its output.
    """

    name: str
    status: str
    seconds: float
    rank: int = -1
    text: str = ""

    @property
    def last_line(self) -> str:
        """The last line of the text that says something, such as the exception's message."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.split(":")[0].split(" ")[0]]
        return (errors or lines or [""])[-1]


def run_tests(jobs: Sequence[Job], at_once: int, timeout: float) -> Iterator[TestResult]:
    """Run tests, `at_once` at a time, and yield results as they come; leave no process behind."""
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Running(waiting.pop(), timeout))
            sentinels = [p.sentinel for test in running for p in test.alive()]
            multiprocessing.connection.wait(sentinels, timeout=0.2)
            for test in [test for test in running if test.over()]:
                running.remove(test)
                yield test.result()
                test.close()
    finally:
        for test in running:
            test.close()


@dataclass
class _Running:
    job: Job
    timeout: float
    processes: list[ForkProcess] = field(default_factory=list)
    timed_out: bool = False

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._failed_at = float("inf")
        self._killed: set[int] = set()
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        for sub in ("barrier", "test_dir", "init_dir"):
            (self._folder / sub).mkdir()
        context = multiprocessing.get_context("fork")
        for rank in range(self.job.ranks):
            args = (rank, self._folder)
            process = context.Process(target=self.job.run_rank, args=args, daemon=True)
            process.start()
            self.processes.append(process)

    def alive(self) -> list[ForkProcess]:
        return [process for process in self.processes if process.is_alive()]

    def over(self) -> bool:
        """Return whether all ranks have ended; end those that wait for a rank that failed."""
        now = time.monotonic()
        if any(process.exitcode not in (None, 0) for process in self.processes):
            self._failed_at = min(self._failed_at, now)
        self.timed_out = self.timed_out or (
            now - self._start > self.timeout and self._failed_at == float("inf")
        )
        if self.timed_out or now - self._failed_at > _GRACE:
            self._kill()
        return not self.alive()

    def result(self) -> TestResult:
        ranks = [self._read(rank) for rank in range(self.job.ranks)]
        status, rank, text = self._judge(ranks)
        return TestResult(self.job.name, status, time.monotonic() - self._start, rank, text)

    def close(self) -> None:
        self._kill()
        for process in self.processes:
            process.close()
        self._temporary.cleanup()

    def _kill(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                self._killed.add(rank)
                process.kill()
                process.join()

    def _read(self, rank: int) -> RankResult | None:
        path = self._folder / f"result-{rank}"
        return RankResult(**json.loads(path.read_text())) if path.exists() else None

    def _judge(self, ranks: Sequence[RankResult | None]) -> tuple[str, int, str]:
        crash = self._crash(lambda code: code < 0)
        if crash:  # what the others then run into is its consequence
            return crash
        failed = [(r.when, i) for i, r in enumerate(ranks) if r and r.outcome == "failed"]
        if failed:
            rank = min(failed)[1]
            result = ranks[rank]
            return "failed", rank, result.text if result else ""
        if self.timed_out:
            stuck = next((i for i, r in enumerate(ranks) if r is None), 0)
            return "timed out", stuck, self._output(stuck)
        crash = self._crash(lambda code: code != 0)
        if crash:
            return crash
        skipped = [r.text for r in ranks if r and r.outcome == "skipped"]
        if skipped:
            return "not run", -1, skipped[0]
        if not any(r and r.built for r in ranks):
            return "not run", -1, "never built what is under test"
        return "passed", -1, ""

    def _crash(self, died: Callable[[int], bool]) -> tuple[str, int, str] | None:
        for rank, process in enumerate(self.processes):
            ended_itself = rank not in self._killed
            if ended_itself and process.exitcode is not None and died(process.exitcode):
                return "crashed", rank, f"exit code {process.exitcode}\n{self._output(rank)}"
        return None

    def _output(self, rank: int) -> str:
        path = self._folder / f"output-{rank}"
        return path.read_text(errors="replace")[-_OUTPUT_SHOWN:] if path.exists() else ""
