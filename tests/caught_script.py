"""Trains until the last rank loses its link, or stops. Each rank catches its error and exits.

See test_cut_link.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import fastsync

FAILS_AT = 3  # steps after which
LATE = 1.0  # seconds by which rank 1 waits later than rank 0 for one that stops


def fail(rank, world, how):
    dist.barrier()
    if rank == 1 and how == "stop":
        time.sleep(LATE)
    if rank == world - 1 and how == "cut":
        subprocess.run(["ip", "link", "set", "fslink", "down"], check=True)
    if rank == world - 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def train(rank, world, how, options):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = fastsync.FastDDP(net, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(100):
        if step == FAILS_AT:
            fail(rank, world, how)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


def main():
    how, options = sys.argv[1], json.loads(sys.argv[2])
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = os.environ.get("MEETS_AT", "env://")
    patience = timedelta(seconds=float(os.environ.get("TIMEOUT", "6")))
    dist.init_process_group("gloo", place, patience, world_size=world, rank=rank)
    began = time.monotonic()
    try:
        train(rank, world, how, options)
        seen = {"error": None}
    except Exception as error:
        seen = {"error": type(error).__name__, "ranks": getattr(error, "ranks", None)}
        seen["text"] = str(error)
    seen["seconds"] = time.monotonic() - began
    print(json.dumps(seen), flush=True)
    os._exit(0)  # without waiting for anybody


if __name__ == "__main__":
    main()
