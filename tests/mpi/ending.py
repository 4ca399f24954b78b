"""Rank of tests/mpi/test_mpi_errors.py, with the way in which a training ends badly.

mpirun -n 2 python -m tests.mpi.ending raise
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def in_model(rank):
    """A training in which rank 1 raises."""
    import fastsync

    model = fastsync.FastDDP(torch.nn.Linear(4, 4))
    for step in range(100):
        if rank == 1 and step == 3:
            raise ValueError("a bad batch")
        model(torch.ones(2, 4)).sum().backward()


def waits(rank):
    """Rank 1 leaves; the other one waits for it in a collective."""
    if rank == 1:
        return
    dist.all_reduce(torch.ones(3))


def exits(rank):
    if rank == 1:
        sys.exit(7)
    dist.all_reduce(torch.ones(3))


def raises(rank):
    if rank == 1:
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(3))


def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def interrupted(rank):
    if rank == 1:
        signal.raise_signal(signal.SIGINT)
    dist.all_reduce(torch.ones(3))


def stuck(rank):
    """All wait in a collective until Ctrl-C."""
    print("waits", flush=True)
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(3))


def slow(rank):
    """Rank 0 has begun all that it takes part in and left, when rank 2 comes: nothing is wrong."""
    tensor = torch.ones(3)
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)
        return
    if rank == 2:
        time.sleep(3)
    dist.all_reduce(tensor)
    print(f"rank {rank} has {tensor.tolist()}\n", end="", flush=True)  # in one piece


def sizes(rank):
    dist.all_reduce(torch.ones(3 + rank))


def kinds(rank):
    if rank == 1:
        dist.broadcast(torch.ones(3), 0)
    dist.all_reduce(torch.ones(3))


def messages(rank):
    if rank == 1:
        dist.send(torch.ones(3), 0)
    else:
        dist.recv(torch.ones(5), 1)


def premultiplied(rank):
    from torch.distributed import _make_nccl_premul_sum

    dist.all_reduce(torch.ones(3), op=_make_nccl_premul_sum(2.0))


def fp8(rank):
    dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))


def sparse(rank):
    dist.all_reduce(torch.eye(3).to_sparse())


def late(rank):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(3), group=group)


def elastic(rank):
    import fastsync

    fastsync.FastDDP(torch.nn.Linear(4, 4), faults=fastsync.Faults(elastic=True))


def main():
    import fastsync.mpi

    dist.init_process_group(fastsync.mpi.NAME)
    dist.barrier()
    print(f"begins at {time.time():.2f}", flush=True)
    globals()[sys.argv[1]](dist.get_rank())


if __name__ == "__main__":
    main()
