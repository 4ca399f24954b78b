"""Trains until the last rank loses its link, or stops. Each rank catches its error, prints what it
has seen as JSON, and exits. See cut_link.py.
"""

import hashlib
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

LAYERS = 4
FAILS_AT = 3  # steps after which
LATE = 1.0  # seconds by which rank 1 waits later than rank 0 for one that stops


def fail(rank, world, how, seen):
    if rank == 1 and how == "stop":
        time.sleep(LATE)
    if rank == world - 1 and how == "cut":
        seen["struck"] = time.time()
        subprocess.run(["ip", "link", "set", "fslink", "down"], check=True)
    if rank == world - 1 and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def digest(net):
    state = hashlib.blake2b(digest_size=8)
    for param in net.parameters():
        state.update(param.detach().numpy().tobytes())
    return state.hexdigest()


def train(rank, world, job, seen):
    how, options, place = job
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    model = fastsync.FastDDP(net, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def strike(grad):
        fail(rank, world, how, seen)

    for step in range(100):
        x = torch.randn(4, 64)
        if step == FAILS_AT:
            dist.barrier()
        if step == FAILS_AT and place == "forward":
            strike(x)
        optimizer.zero_grad()
        if step == FAILS_AT and place == "backward":  # when the gradients of two layers are there
            net[LAYERS - 3].register_forward_hook(
                lambda module, args, output: output.register_hook(strike) and None
            )
        model(x).square().mean().backward()
        optimizer.step()
        seen["weights"].append(digest(net))


def main():
    job = json.loads(sys.argv[1])
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = os.environ.get("MEETS_AT", "env://")
    patience = timedelta(seconds=float(os.environ.get("TIMEOUT", "6")))
    dist.init_process_group("gloo", place, patience, world_size=world, rank=rank)
    began = time.monotonic()
    seen = {"error": None, "struck": None, "weights": []}
    try:
        train(rank, world, job, seen)
    except Exception as error:
        seen |= {name: getattr(error, name, None) for name in ("ranks", "bucket")}
        seen |= {"error": type(error).__name__, "text": str(error), "at": time.time()}
        seen["waited"] = getattr(error, "seconds", None)
    seen["seconds"] = time.monotonic() - began
    print(json.dumps(seen), flush=True)
    os._exit(0)  # without waiting for anybody


if __name__ == "__main__":
    main()
