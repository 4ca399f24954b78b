"""Process groups of fastsync's own, where the default group is bound to a device.

torch then splits the default group's communicator for each group that is made, which every rank of
the default group has to join: also one that has no part in that group.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from tests.simulated.ranks import run_simulated

DEVICE = "sim"


def bind(rank, world):
    """Make the default group anew, as `init_process_group(device_id=...)` does."""
    from tests.simulated.device import GROUP

    store = PrefixStore("bound", distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    bound = torch.device(DEVICE, 0)
    limit = timedelta(minutes=1)
    dist.init_process_group(
        GROUP, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound
    )
    return bound


def make_parts(rank, world):
    """Return how often torch looked for what to split, and a sum over a group of two of 3 ranks."""
    from fastsync.reducer.process_groups import OwnGroups, new_part

    bound = bind(rank, world)
    pair = dist.new_group([0, 1])
    if rank == 2:
        return 0, 2.0, True
    splits, of_torch = [], distributed_c10d._get_split_source
    distributed_c10d._get_split_source = lambda group: splits.append(group) or of_torch(group)
    try:
        part = new_part(pair, 2, "a part of the world", OwnGroups())
    finally:
        distributed_c10d._get_split_source = of_torch
    x = torch.ones(3, device=DEVICE)
    dist.all_reduce(x, group=part)
    return len(splits), x[0].item(), dist.group.WORLD.bound_device_id == bound


def test_a_part_of_the_world_needs_no_other_ranks():
    assert run_simulated(make_parts, 3) == [(0, 2.0, True)] * 3
