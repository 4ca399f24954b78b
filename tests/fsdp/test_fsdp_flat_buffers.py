"""Units on backends without messages, where equal chunks travel in one flat buffer."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastsync import fully_shard
from tests.fsdp.test_fsdp_wires import INT8, Twin, Weighed, numbers_of
from tests.helpers.backends import OverGloo
from tests.helpers.teams import run_ranks


class Flat(OverGloo):
    """Between chunks of equal size as on NCCL: what is gathered is this rank's part everywhere."""

    called = "flat"

    def __init__(self, rank, world, inner):
        super().__init__(rank, world, inner)
        fake = FakeProcessGroup._create_internal(rank, world)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)

    def all_to_all_single(self, *args):
        return self._inner.alltoall_base(*args)

    alltoall_base = all_to_all_single  # its name before torch 2.13


def make_flat(prefix_store, rank, world, timeout):
    return Flat(rank, world, dist.ProcessGroupGloo(prefix_store, rank, world, timeout))


def over_flat_buffers(rank, world):
    """Return whether gradients are the twin's, and this rank's share is gathered for all others."""
    dist.Backend.register_backend("flat", make_flat, devices=["cpu"])
    group = dist.new_group(backend="flat")
    model = Weighed()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), **INT8)
    model(numbers_of(rank, 0)).backward()
    twin = Twin(world, "int8", "int8")
    found = []
    rows = zip(model.parameters(), twin.averages(0), model.seen, twin.seen(), strict=True)
    for param, average, seen, wanted in rows:
        mine = param.grad.to_local()
        begin = rank * -(-len(average) // world)
        found.append(torch.equal(mine, average[begin : begin + len(mine)]))
        own = wanted[begin : begin + len(mine)]
        full = len(own) * world == len(wanted)  # else the last share is shorter than the others
        found.append(not full or torch.equal(seen, torch.cat([own] * world)))
    return found


@pytest.mark.slow("3")
@pytest.mark.parametrize("world", [2, 3])
def test_codes_travel_in_flat_buffers_where_there_are_no_messages(world):
    for found in run_ranks(over_flat_buffers, world):
        assert all(found)
