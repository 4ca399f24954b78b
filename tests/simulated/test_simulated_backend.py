"""The backend: enqueued as by NCCL, over Gloo, between two ranks."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from fastsync.testing import RankError
from tests.helpers import models
from tests.simulated.ranks import run_simulated

DEVICE = "sim"


def low():
    from tests.simulated.device import low

    return low


def collectives(rank, world):
    def ones(*sizes, factor=1.0):
        return torch.full(sizes, (rank + 1) * factor, device=DEVICE)

    found = {}
    x = ones(4)
    dist.all_reduce(x)
    found["all_reduce"] = x
    x = ones(4)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    found["average"] = x
    found["all_gather"] = torch.zeros(4, device=DEVICE)
    dist.all_gather_into_tensor(found["all_gather"], ones(2))
    found["reduce_scatter"] = torch.zeros(2, device=DEVICE)
    dist.reduce_scatter_tensor(found["reduce_scatter"], ones(4))
    found["all_to_all"] = torch.zeros(4, device=DEVICE)
    dist.all_to_all_single(found["all_to_all"], ones(4))
    x = ones(3)
    dist.broadcast(x, 1)
    found["broadcast"] = x
    parts = [torch.zeros(2, device=DEVICE) for _ in range(2)]
    dist.all_gather(parts, ones(2))
    found["list"] = torch.cat(parts)
    dist.barrier()
    return {name: value.tolist() for name, value in found.items()}


def test_collectives():
    wanted = {
        "all_reduce": [3.0] * 4,
        "average": [1.5] * 4,
        "all_gather": [1.0, 1.0, 2.0, 2.0],
        "reduce_scatter": [3.0] * 2,
        "all_to_all": [1.0, 1.0, 2.0, 2.0],
        "broadcast": [2.0] * 3,
        "list": [1.0, 1.0, 2.0, 2.0],
    }
    assert run_simulated(collectives, 2) == [wanted, wanted]


def host_does_not_wait(rank, world):
    """Rank 1 comes half a second late: what rank 0's host does meanwhile."""
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)  # ranks meet here
    low().synchronize()
    if rank == 1:
        time.sleep(0.5)
    low().report(reset=True)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    done = future.done(), work.is_completed()
    work.wait()
    y = x + 1
    waits = len(low().report().waits)
    return done, waits, y.tolist()


def test_the_host_does_not_wait():
    first, second = run_simulated(host_does_not_wait, 2)
    assert first == ((True, False), 0, [5.0] * 4)
    assert second[1:] == (0, [5.0] * 4)


def ddp(rank, world):
    results = []
    for device in (DEVICE, "cpu"):
        model = DDP(models.build("many").to(device), bucket_cap_mb=0.002)
        opt = models.OPTIMIZERS["adamw"](model.parameters())
        for step in range(4):
            opt.zero_grad()
            models.loss_of(model(models.batch("many", 10 * step + rank).to(device))).backward()
            opt.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    return all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.slow("1")
@pytest.mark.parametrize("seed", range(2))
def test_torchs_ddp_trains_as_on_the_cpu(seed):
    assert all(run_simulated(ddp, 2, seed=seed, lag=3.0))


def refusals(rank, world):
    flat = torch.ones(4, 4, device=DEVICE)
    group = dist.group.WORLD._get_backend(torch.device(DEVICE))
    texts = []
    for call in (
        lambda: dist.all_reduce(flat.t()),
        lambda: dist.all_reduce(flat[:, ::2]),
        lambda: group.allreduce([torch.ones(3)]),
        lambda: dist.all_reduce(flat.int(), dist.ReduceOp.BAND),
    ):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        texts.append(str(raised.value).splitlines()[0])
    return texts


def test_what_nccl_refuses():
    for texts in run_simulated(refusals, 2):
        contiguous = "all_reduce: tensors must be contiguous"
        assert texts == [
            contiguous,
            contiguous,
            "all_reduce: tensors must be on the device",
            "NCCL has no bitwise reductions",
        ]


def peer_leaves(rank, world):
    """Rank 1 ends in a collective's stead. Rank 0's kernel spins until it aborts."""
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    low().synchronize()
    if rank == 1:
        return None
    backend = dist.group.WORLD._get_backend(torch.device(DEVICE))
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.5)
    spins = not work.is_completed()
    backend.abort()
    low().synchronize()
    return spins, work.is_completed()


def test_a_collective_without_its_peer_spins_until_abort():
    assert run_simulated(peer_leaves, 2)[0] == (True, True)


def times_out(rank, world):
    os.environ["SIMCCL_TIMEOUT"] = "0.5"
    group = dist.new_group([0, 1])
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x, group=group)
    low().synchronize()
    if rank == 1:
        return
    dist.all_reduce(x, group=group)
    low().synchronize()


def test_the_watchdog_ends_a_process():
    with pytest.raises(RankError) as raised:
        run_simulated(times_out, 2)
    assert re.search(r"rank 0 was killed by SIGABRT", str(raised.value))
