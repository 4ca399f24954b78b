"""Trains until rank 1 kills itself in step 6, at once: its last report is of an earlier step. Each
other rank prints the error that it gets. See test_faults.py.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

import fastsync

DIES_IN = 6
BEAT = 0.1  # seconds between two reports


def train(rank):
    torch.set_num_threads(1)
    model = fastsync.FastDDP(nn.Linear(4, 4))
    for step in range(1, DIES_IN + 1):
        if step == 2:
            time.sleep(3 * BEAT)
        if rank == 1 and step == DIES_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).sum().backward()


def main():
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        train(rank)
    except fastsync.SyncFault as error:
        print(f"SyncFault: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
