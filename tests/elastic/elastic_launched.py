"""Rank that `python -m fastsync.elastic` starts in test_elastic_launcher.py, and that may die.

`python -m tests.elastic.elastic_launched STEPS VICTIM [HOW [FOLDER]]`: rank VICTIM kills itself in
its third forward. If it comes back, the training ends three steps after that. Values of HOW:

* `last`: once rank VICTIM is back the others kill themselves, and it ends three steps later.
* `joined`, `two`: the training ends three steps after a rank has joined, or two have.
* `dies`: likewise, where a rank that joins kills itself in its second step, and does not when it is
  started again.
* `early`: rank 3, which joins, makes its process group while ranks 1 and 2 have not.

With `+diloco:4` at its end, parameters are averaged in that mode.

The script goes by RANK and WORLD_SIZE, and imports fastsync once its process group is made.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANKS = {"last": 1, "joined": 4, "early": 4, "dies": 4, "two": 5}  # at the end
BEFORE = {1: 3, 2: 3, 3: 0}  # whom each waits for with `early`


def say(line):
    """At once, so that no other rank writes into it."""
    os.write(1, f"{line}\n".encode())


def begin(rank, folder, by_address):
    """Make the process group; in turn, where there is a folder to tell each other through."""
    while folder and rank in BEFORE and not Path(folder, f"{BEFORE[rank]}").exists():
        time.sleep(0.01)
    if folder and rank == 0:  # which waits for the others
        Path(folder, "0").touch()
    if folder and rank == 3:
        time.sleep(0.5)  # until rank 0 has told where it is
    there = {}
    if by_address:
        place = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        there = {"init_method": place, "rank": rank, "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", **there)
    if folder:
        Path(folder, f"{rank}").touch()


def is_over(model, ranks, step):
    """Return whether `ranks` ranks train since three steps, and are not those that have begun."""
    now = model.elastic
    changed = now.since > (1 if ranks > 3 else 3)
    return changed and now.size == ranks and step > now.since + 2


def main():
    steps, victim, how, folder = *map(int, sys.argv[1:3]), *[*sys.argv[3:], "", ""][:2]
    how, _, mode = how.partition("+")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    begin(rank, folder, by_address=how == "two")
    import fastsync

    faults = fastsync.Faults(elastic=True)
    model = fastsync.FastDDP(nn.Linear(4, 4), faults=faults, sync=mode or None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = model.catch_up(optimizer)
    dies_at = 2 if rank == victim else -1
    if how == "dies" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        dies_at = done + 1
    for step in range(done, steps):
        leaves = how == "last" and rank != victim and is_over(model, 3, step)
        if step == dies_at or leaves:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_over(model, RANKS.get(how, 3), step):
            break
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank))).square().mean().backward()
        optimizer.step()
        if step == 0:
            say(f"trains {os.getpid()}")
        time.sleep(0.01)
    model.end_round()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    say(f"rank {rank} of {model.elastic.ranks}: {total.hex()}")
    say(f"RANK {rank} of WORLD_SIZE {os.environ['WORLD_SIZE']}")


if __name__ == "__main__":
    main()
