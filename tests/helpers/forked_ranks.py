"""Ranks that a script forks, some of which die or hang."""

import os
import signal
import sys
import time

__all__ = ["end_of", "fork_ranks"]


def fork_ranks(world, log_of, run):
    """Fork a process for each rank that calls `run(rank)`; return their ids.

    What one prints goes to the file `log_of(rank)`.
    """
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            log = os.open(log_of(rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run(rank)
            sys.exit()
        children.append(child)
    return children


def end_of(children, limit, lingering=0):
    """Return how each process ended; None where it had to be killed.

    Args:
        limit: seconds that they have.
        lingering: how many of them are waited for only as long as the others.
    """
    ended, deadline = {}, time.monotonic() + limit
    while len(ended) < len(children) - lingering and time.monotonic() < deadline:
        for rank, pid in enumerate(children):
            if rank in ended:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for rank, pid in enumerate(children):
        if rank not in ended:
            os.kill(pid, signal.SIGABRT if "-v" in sys.argv else signal.SIGKILL)
            os.waitpid(pid, 0)
    return [ended.get(rank) for rank in range(len(children))]
