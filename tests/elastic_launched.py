"""What `python -m fastsync.elastic` starts in test_elastic_launcher.py: a rank that may die.

`python -m tests.elastic_launched STEPS VICTIM [last | joined]`: rank VICTIM kills itself in its
third forward. If it comes back, the training ends three steps after that; with `last` the others
kill themselves then, and it ends three steps later. With `joined` it ends once a rank has joined.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import fastsync


def say(line):
    """At once, so that no other rank writes into it."""
    os.write(1, f"{line}\n".encode())


def main():
    steps, victim = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = int(os.environ["FASTSYNC_ELASTIC_RANK"].partition("/")[0])
    model = fastsync.FastDDP(nn.Linear(4, 4), elastic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = model.catch_up(optimizer)
    how = sys.argv[3] if sys.argv[3:] else ""
    enough = {"last": 1, "joined": 4}.get(how, 3)
    for step in range(done, steps):
        if model.elastic.since > 3 and step > model.elastic.since + 2:
            if model.elastic.size == 3 and how == "last" and rank != victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if model.elastic.size == enough:
                break
        if step == 2 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank))).square().mean().backward()
        optimizer.step()
        if step == 0:
            say(f"trains {os.getpid()}")
        time.sleep(0.01)
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    say(f"rank {rank} of {model.elastic.ranks}: {total.hex()}")


if __name__ == "__main__":
    main()
