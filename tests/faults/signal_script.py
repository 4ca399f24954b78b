"""Ranks that are somewhere when a signal comes, or one raises. Run by torchrun.

See test_signals.py. Rank 1 stays in a place of its third step, and the others wait for it.
"""

import atexit
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fastsync
from fastsync.reducer import engine
from tests.faults.launched import leave_process_number

STEP = 2
SLOWLY = 1.0  # seconds that a rank takes to end


class Stay(torch.autograd.Function):
    """In a backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        stay()
        return gradient


class Model(torch.nn.Module):
    """With a place where a rank stays: in a forward, or in a backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.bias.requires_grad_(False)
        self.place = ""

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.place == "forward":
            stay()
        if self.place == "raises":
            raise ValueError("bad batch")
        return self.second(Stay.apply(hidden) if self.place == "backward" else hidden)


def stay():
    time.sleep(1000)


def stay_in_votes(*facts):
    stay()


def come_to(place, model, rank):
    """Before the third step."""
    model.module.second.bias.requires_grad_(place in ("vote", "meeting"))
    if rank != 1:
        return
    model.module.place = place
    if place == "raises":
        atexit.register(time.sleep, SLOWLY)
    if place == "vote":
        engine.agree_on_plan = stay_in_votes
    if place == "meeting":  # which the others hold in the store
        stay()


def main():
    folder, place, stage = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    leave_process_number(folder, rank)
    model = fastsync.FastDDP(Model(), zero=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEP + 1):
        if step == STEP:
            (folder / f"comes {rank}").touch()
            come_to(place, model, rank)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
