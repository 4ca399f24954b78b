"""Runs the ranks of a benchmark, once or several times, and gathers what their main ranks report.

The process that a user starts launches the jobs one after the other; each is this same command
again, once per rank, and its main rank reports a part of the result through a file. After every job
the command gets all parts so far, so that an interrupted benchmark keeps what it has measured.
Under torchrun there is one job, its own.
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

import torch

from bench.measure import netns
from examples.common.ranks import INTERRUPTED, Group, anywhere, is_rank, launch, over_sockets

PART_VARIABLE = "BENCH_PART"  # where the main rank leaves its part

Part = dict[str, Any]
Report = Callable[[Part], None]


@dataclass(frozen=True)
class Job:
    """One start of all ranks.

    Attributes:
        world: how many ranks; 0: none, the work is done in the process that the user started.
        on_links: each rank lives in a namespace of its own, joined by links that can be shaped.
        over_sockets: ranks on GPUs talk as if each had a host of its own, and may share a GPU.
    """

    world: int
    on_links: bool = False
    over_sockets: bool = False


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
        finish: called with the parts of all jobs so far, again and again.

    Raises:
        MissingRights: a job needs links, which cannot be made here.
    """
    if is_rank():
        path = os.environ.get(PART_VARIABLE)
        leave = _leave_at(Path(path)) if path else lambda part: finish([part])
        return launch(lambda group: main(group, leave), 0, threads)
    parts: list[Part] = []
    with tempfile.TemporaryDirectory(prefix="fastsync-bench-") as folder, terminable():
        try:
            if any(job.on_links for job in jobs):
                netns.require()
            for number, job in enumerate(jobs):
                path = f"{folder}/{number}.json"
                code = _start(job, threads, path, main)
                if os.path.exists(path):
                    parts.append(json.loads(Path(path).read_text(encoding="utf-8")))
                    finish(parts)
                if code:
                    return code
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED
    return 0


def _leave_at(path: Path) -> Report:
    def leave(part: Part) -> None:
        path.write_text(json.dumps(part), encoding="utf-8")

    return leave


def _start(job: Job, threads: int, path: str, main: Callable[[Group, Report], int]) -> int:
    if not job.world:
        torch.set_num_threads(threads)
        return main(Group(0, 1, torch.device("cpu")), _leave_at(Path(path)))

    def only_in_ranks(group: Group) -> int:
        raise AssertionError("the ranks run this command's own main")

    os.environ[PART_VARIABLE] = path
    if job.on_links:
        with netns.Network(job.world) as network:
            return launch(only_in_ranks, job.world, threads, network.placement)
    return launch(only_in_ranks, job.world, threads, over_sockets if job.over_sockets else anywhere)


@contextmanager
def terminable() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end this process as Ctrl-C does, so that links are removed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with netns.handled((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield
