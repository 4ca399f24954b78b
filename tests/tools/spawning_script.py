"""Trains under torch's DDP in two processes of torch.multiprocessing.spawn.

Imports nothing of fastsync; see test_run_command.py. Prints, for each rank, the engine that it got
all the same, its wire, the averaged gradient and where fastsync lies.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train(rank, folder):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    kind = "FastDDP" if "fastsync.ddp.fast_ddp" in str(type(model).__mro__) else "DDP"
    wire = model._policy.wire.format if hasattr(model, "_policy") else "none"
    fastsync = sys.modules.get("fastsync")
    place = Path(fastsync.__file__).parent if fastsync else None
    grad = model.module.weight.grad.flatten().tolist()
    print(f"<rank {rank}|{kind}|{wire}|{grad}|{place}>", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), nprocs=RANKS)
