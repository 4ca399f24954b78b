"""Runs the ranks of a benchmark, once or several times.

The process that a user starts launches the jobs one after the other; each is this same command
again, once per rank. Under torchrun there is one job, its own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.measure import netns
from examples.common import ranks

JOB_VARIABLE = "BENCH_JOB"  # tells a rank the number of its job

Main = Callable[[ranks.Group], int]


@dataclass(frozen=True)
class Job:
    """One start of all ranks.

    Attributes:
        world: how many ranks; 0: none, the work is done in the process that the user started.
        on_links: ranks live in namespaces of their own, joined by links that can be shaped.
        over_sockets: ranks on GPUs talk as if each had a host of its own, and may share a GPU.
        per_node: so many ranks share a namespace, as those of one machine.
    """

    world: int
    on_links: bool = False
    over_sockets: bool = False
    per_node: int = 1


def run_jobs(main: Main, jobs: Sequence[Job], threads: int) -> int:
    """Run `main` on every rank of every job, until one fails, and return an exit code.

    Args:
        threads: CPU threads of torch in each rank.

    Raises:
        MissingRights: a job needs links, which cannot be made here.
    """
    if ranks.is_rank():
        return ranks.launch(main, 0, threads)
    for ending in (signal.SIGTERM, signal.SIGHUP):  # ranks are stopped then too
        signal.signal(ending, signal.default_int_handler)
    try:
        missing = netns.missing_rights() if any(job.on_links for job in jobs) else None
        if missing:
            raise ranks.MissingRights(missing)
        for number, job in enumerate(jobs):
            os.environ[JOB_VARIABLE] = str(number)
            code = _start(job, threads, main)
            if code:
                return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return ranks.INTERRUPTED
    return 0


def number_of_job() -> int:
    """Return the number of this rank's job, from 0."""
    return int(os.environ.get(JOB_VARIABLE, "0"))


def _start(job: Job, threads: int, main: Main) -> int:
    if not job.world:
        torch.set_num_threads(threads)
        return main(ranks.Group(0, 1, torch.device("cpu")))
    if job.on_links:
        with netns.network(job.world // job.per_node) as seats:

            def seated(rank: int) -> ranks.Placement:
                return seats[rank // job.per_node].placement(rank % job.per_node, job.per_node)

            return ranks.launch(main, job.world, threads, seated)
    place = ranks.over_sockets if job.over_sockets else ranks.anywhere
    return ranks.launch(main, job.world, threads, place)
