"""Rank 1 sleeps in its third step, and rank 0 waits for it. Run by torchrun; see test_ends.py."""

import time

import torch
import torch.distributed as dist

import fastsync


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = fastsync.FastDDP(torch.nn.Linear(4, 4))
    for step in range(3):
        loss = model(torch.ones(1, 4)).sum()
        if step == 2:
            print("waiting", flush=True)
            if dist.get_rank() == 1:
                time.sleep(1000)
        loss.backward()


if __name__ == "__main__":
    main()
