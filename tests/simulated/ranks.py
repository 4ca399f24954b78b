"""Ranks with a simulated device each, forked from a server that has loaded it."""

import contextlib
import multiprocessing.forkserver as forkserver
from datetime import timedelta

from fastsync.testing import run_ranks
from tests.simulated import build

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["pytest", "tests.simulated.preloaded"])


@contextlib.contextmanager
def _own_server():
    """Fork from the server with the device, beside which torch's own ranks have another."""
    former = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = former


def run_simulated(fn, world, *args, seed=0, lag=1.0, timeout=90.0):
    """Return what `fn(rank, world, *args)` returns on each rank, once its device is idle."""
    for name in (build.DEVICE, build.ENGINE):
        build.library(name)
    with _own_server():
        return run_ranks(_on_device, world, seed, lag, fn, args, timeout=timeout)


def _on_device(rank, world, seed, lag, fn, args):
    import torch.distributed as dist
    from torch.distributed import PrefixStore, distributed_c10d

    from tests.simulated.device import GROUP, low

    low.seed(1000 * seed + rank)
    low.set_lag(lag)
    store = PrefixStore("simulated", distributed_c10d._get_default_store())
    dist.barrier()  # a rank that leaves while another still connects would fail it
    dist.destroy_process_group()
    dist.init_process_group(
        GROUP, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=1)
    )
    result = fn(rank, world, *args)
    low.synchronize()
    return result
