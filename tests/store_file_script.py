"""Ranks that meet through a file, of which one dies within a record that it writes there.

    python tests/store_file_script.py RANK WORLD FILE PIECES DEATH

The last rank writes so many of a record's four pieces and is gone; DEATH is "wrap" or "checkpoint".
"""

import fcntl
import os
import signal
import struct
import sys

import torch
import torch.distributed as dist

import fastsync
from fastsync.torch_private import group_store, root_store

PIECES = (struct.pack("I", 10), b"/rank/2/in", struct.pack("I", 1), b"1")


def tear(path, pieces):
    """Leaves the file as a process does that is killed within torch's `FileStore.set`: it has had
    the lock, so nobody else is writing."""
    with open(path, "ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"".join(PIECES[:pieces]))


class Victim(torch.nn.Linear):
    """Dies while a model of it is wrapped."""

    def __init__(self, die):
        super().__init__(8, 8)
        self.die = die

    def named_buffers(self, *args, **kwargs):
        self.die()
        return super().named_buffers(*args, **kwargs)


def train(rank, path, pieces, death):
    def die():
        tear(path, pieces)
        os.kill(os.getpid(), signal.SIGKILL)

    last = rank == dist.get_world_size() - 1
    net = Victim(die) if last and death == "wrap" else torch.nn.Linear(8, 8)
    model = fastsync.FastDDP(net, zero=2, wire=fastsync.Wire(shared_memory=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if last and step == 1:
            die()
        optimizer.state_dict()  # for which ranks meet through the store


def main():
    rank, world, path, pieces, death = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=int(rank), world_size=int(world)
    )
    assert root_store(group_store(dist.group.WORLD)).path == path
    try:
        train(int(rank), path, int(pieces), death)
    except fastsync.SyncFault as error:
        print(f"SyncFault of {error.ranks}", flush=True)


if __name__ == "__main__":
    main()
