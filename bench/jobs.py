"""Runs the ranks of a benchmark, once or several times, and gathers what their main ranks report.

A command hands its `main` and a list of jobs to `run_jobs`. The process that a user starts launches
the jobs one after the other; each is this same command again, once per rank, and its main rank
reports a part of the result through a file. After every job the command gets all parts so far, so
that an interrupted benchmark keeps what it has measured. Under torchrun there is one job, its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import netns
from bench.errors import UsageError
from bench.launch import INTERRUPTED, Group, is_rank, launch, over_sockets
from bench.signals import handled

PART_VARIABLE = "BENCH_PART"  # where the main rank leaves its part

Part = dict[str, Any]
Report = Callable[[Part], None]


@dataclass(frozen=True)
class Job:
    """One start of all ranks.

    Attributes:
        world: how many ranks.
        on_links: each rank lives in a namespace of its own, joined by links that can be shaped.
        over_sockets: ranks on GPUs talk as if each had a host of its own, and may share a GPU.
    """

    world: int
    on_links: bool = False
    over_sockets: bool = False


def worlds(text: str, least: int = 1) -> list[int]:
    """Parses numbers of ranks, such as "2,4".

    Raises:
        UsageError: it holds something else, or a number below `least`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expects numbers of ranks such as 2,4 but got {text!r}") from None
    if min(numbers) < least:
        raise UsageError(f"expects at least {least} rank(s) but got --ranks {text}")
    return numbers


def run_jobs(
    main: Callable[[Group, Report], int],
    jobs: Sequence[Job],
    threads: int,
    finish: Callable[[list[Part]], None],
) -> int:
    """Runs `main` on every rank of every job and returns an exit code.

    Args:
        main: gets the rank's group and a function by which the main rank reports its part; what
            is reported last counts.
        threads: CPU threads of torch in each rank.
        finish: called with the parts of all jobs so far after each job.

    Raises:
        MissingRights: a job needs links, which cannot be made here.
    """
    if is_rank():
        return launch(lambda group: main(group, lambda part: _report(part, finish)), 0, threads)
    with tempfile.TemporaryDirectory(prefix="fastsync-bench-") as folder, _terminable():
        try:
            if any(job.on_links for job in jobs):
                netns.require()
            return _run_all(jobs, threads, finish, Path(folder))
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED


def _run_all(
    jobs: Sequence[Job], threads: int, finish: Callable[[list[Part]], None], folder: Path
) -> int:
    parts: list[Part] = []
    for number, job in enumerate(jobs):
        path = folder / f"{number}.json"
        os.environ[PART_VARIABLE] = str(path)
        code = _start(job, threads)
        if path.exists():
            parts.append(json.loads(path.read_text(encoding="utf-8")))
            finish(parts)
        if code:
            return code
    return 0


def _start(job: Job, threads: int) -> int:
    if job.over_sockets:
        return launch(_only_in_ranks, job.world, threads, over_sockets)
    if not job.on_links:
        return launch(_only_in_ranks, job.world, threads)
    with netns.Network(job.world) as network:
        return launch(_only_in_ranks, job.world, threads, network.placement)


def _only_in_ranks(group: Group) -> int:
    raise AssertionError("the ranks run this command's own main")


def _report(part: Part, finish: Callable[[list[Part]], None]) -> None:
    path = os.environ.get(PART_VARIABLE)
    if path is None:
        finish([part])
    else:
        Path(path).write_text(json.dumps(part), encoding="utf-8")


@contextmanager
def _terminable() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end this process as Ctrl-C does, so that links are removed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handled((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield
