"""Trains on one of several machines, the last of which loses its link. See test_cut_link.py."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import fastsync

CUT_AT = 3  # steps after which
TIMEOUT = 6.0  # seconds


def train(rank, world, options):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = fastsync.FastDDP(net, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(100):
        if step == CUT_AT:
            dist.barrier()
        if step == CUT_AT and rank == world - 1:
            subprocess.run(["ip", "link", "set", "fslink", "down"], check=True)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


def main():
    options, rank, world = (
        json.loads(sys.argv[1]),
        *(int(os.environ[n]) for n in ("RANK", "WORLD_SIZE")),
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    began = time.monotonic()
    try:
        train(rank, world, options)
        seen = {"error": None}
    except Exception as error:
        seen = {"error": type(error).__name__, "ranks": getattr(error, "ranks", None)}
        seen["text"] = str(error)
    seen["seconds"] = time.monotonic() - began
    print(json.dumps(seen), flush=True)
    os._exit(0)  # without waiting for anybody


if __name__ == "__main__":
    main()
