"""Processes that end in every order of destroying, freeing and collecting. See test_exit_order.py.

Prints, as JSON, how the ranks of each job ended. Ranks are forked, so that each costs a fraction of
a second, and leave through the interpreter's own end.
"""

import gc
import json
import os
import signal
import sys
import time

import torch
import torch._dynamo  # wrapping a module would import it
import torch.distributed as dist
import torch.distributed.nn.functional  # later it would keep the default group, for its defaults

import fastsync
from fastsync._build import extension

LIMIT = 30.0  # seconds
RANKS = 2
SMALL = 50
LATE = 0.3  # seconds
STARVED = 10.0  # seconds for which a thread that waits for the GIL does not insist


def reduce_own(rank, late):
    """All-reduces of the script. The last references to their tensors are Gloo's threads'."""
    if late and rank == 1:
        time.sleep(LATE)
    for _ in range(SMALL):
        dist.all_reduce(torch.ones(4), async_op=late)


def leave(rank, folder, wire, late, order):
    """Return what the interpreter's end is to free.

    Args:
        late: rank 0 has its all-reduces under way while it leaves, because rank 1 comes late.
    """
    gc.disable()
    method = f"file://{folder}/{wire}-{late}-{'-'.join(order)}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    kept = [fastsync.FastDDP(torch.nn.Linear(4, 4), wire=wire)]
    for _ in range(3):
        kept[0](torch.ones(1, 4)).sum().backward()
    steps = {"destroy": dist.destroy_process_group, "free": kept.clear, "collect": gc.collect}
    sys.setswitchinterval(STARVED)
    reduce_own(rank, late)
    for step in order:
        steps[step]()
    return kept


def wait_for(children):
    """Exit codes by process; those that are still running at the limit are killed."""
    codes, deadline = {}, time.monotonic() + LIMIT
    while len(codes) < len(children) and time.monotonic() < deadline:
        for pid in children:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in children:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid, "hangs") for pid in children]


def main():
    folder, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    extension.load()
    gc.freeze()  # what the ranks have in common is not worth the time of a search
    endings = []
    for job in jobs:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                return leave(rank, folder, *job)
            children.append(child)
        endings.append(wait_for(children))
    print(json.dumps(endings))
    return []


if __name__ == "__main__":
    LAST = main()
