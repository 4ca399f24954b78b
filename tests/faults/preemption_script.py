"""A training that is told to end at any moment. Run by torchrun; see test_preemption.py.

Each rank leaves files in a folder: its process number, which steps it has reached, what it saves.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import fastsync
from fastsync.config.arguments import grouped
from tests.faults.launched import leave_process_number

FOR_EVER = 100_000  # steps


class Slow(torch.autograd.Function):
    """Takes a moment in a forward, and in a backward."""

    @staticmethod
    def forward(ctx, inputs, pause):
        ctx.pause = pause
        time.sleep(pause)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.pause)
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self, pause):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)
        self.pause = pause

    def forward(self, inputs):
        return self.second(Slow.apply(self.first(inputs), self.pause))


class Numbers(Dataset):
    """Others on each rank."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 4 * FOR_EVER

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index * 17 + self.rank)
        return torch.randn(6, generator=generator)


def batches(case, rank, pause):
    """With `workers` another process loads them; it lasts on the rank that `loads`."""
    workers = case.get("workers", 0)
    init = fastsync.outlive_preemption if workers else None
    for batch in DataLoader(Numbers(rank), 2, num_workers=workers, worker_init_fn=init):
        if case.get("loads") == rank:
            time.sleep(5 * pause)
        yield batch


def train(folder, case, rank, steps=FOR_EVER, pause=0.01):
    """Save after `steps` steps, or before, where the ranks are told to end."""
    done = 0

    def save():
        if case.get("fails") == rank:
            raise OSError("no space left on device")
        while case.get("stuck"):
            time.sleep(0.1)
        found = {"step": done, "weights": weights_of(model)}
        torch.save(found, folder / f"saved {rank} {time.time_ns()}")

    told = {} if steps < FOR_EVER else {"on_preemption": policy(case, save)}
    model = fastsync.FastDDP(Model(pause), **grouped({**case.get("options", {}), **told}))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loaded = batches(case, rank, pause)
    for done in range(case.get("steps", steps)):
        (folder / f"step {rank} {done}").touch()
        if case.get("accumulates"):
            with model.no_sync():
                model(next(loaded)).square().sum().backward()
        model(next(loaded)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    done = steps
    if steps < FOR_EVER:
        save()


def policy(case, save):
    names = case.get("signals")
    return fastsync.PreemptionPolicy(save, tuple(names)) if names else save


def weights_of(model):
    """Whole, by name; collective where they are shared."""
    weights = model.module.state_dict()
    return {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}


def main():
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    leave_process_number(folder, rank)
    train(folder, case, rank)
    if rank == 0:  # still has something to do, alone
        (folder / "alone").touch()
        while not (folder / "over").exists():
            time.sleep(0.05)
    print(f"rank {rank} came to its end", flush=True)


if __name__ == "__main__":
    main()
