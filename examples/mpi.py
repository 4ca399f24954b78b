"""Trains a small GPT over MPI, from the launcher that every cluster has.

    mpirun -n 4 python -m examples.mpi --wire int8 --zero 1

`import fastsync.mpi` takes rank and size from MPI; no address and no port has to be given. Prints
the loss, and exits with 1 unless it falls and all ranks end with the same weights.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from examples import data, gpt

SHAPE = gpt.Shape(width=64, heads=4, layers=2, length=64)
BATCH = 8


def train(model: torch.nn.Module, steps: int) -> list[float]:
    """Return the losses of all steps, means over the ranks."""
    corpus, rank = data.load(), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(corpus.batch(rank, step, BATCH, SHAPE.length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:>3}  loss {losses[-1]:.3f}", flush=True)
    return losses


def same_on_all_ranks(model: torch.nn.Module) -> bool:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    differ = torch.tensor([float(not torch.equal(mine, first))])
    dist.all_reduce(differ)
    return not differ.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--wire", default="fp32", help="FastDDP's wire format")
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2), help="FastDDP's stage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import fastsync.mpi  # not above: --help needs no MPI

    dist.init_process_group(fastsync.mpi.NAME)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks over MPI, wire {args.wire}, zero={args.zero}")
    torch.manual_seed(0)
    model = fastsync.FastDDP(gpt.build(shape=SHAPE), wire=args.wire, zero=args.zero)
    losses = train(model, args.steps)
    good = losses[-1] < losses[0] and same_on_all_ranks(model)
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
