"""Averages of ranks that share a machine, through memory that they map."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP, Wire
from fastsync.config.arguments import grouped
from fastsync.reducer import core
from tests.helpers.teams import run_ranks

WIDTH = 160


def net(seed=0, dtype=torch.float32, width=WIDTH):
    torch.manual_seed(seed)
    layers = (nn.Linear(width, width) for _ in range(4))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(dtype)


def inputs(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(3, WIDTH, generator=generator).to(dtype)


def gradients(model):
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def same(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) if a is not None else b is None for a, b in pairs)


def over(way, wrap):
    """Return what `wrap()` makes, with gradients through shared memory or through the group."""
    os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[way]
    return wrap()


def in_memory(wrapped):
    """Return how much of the gradients lies in this process's shared memory."""
    spaces = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fastsync" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            spaces.append((begin, end))
    places = [p.grad.data_ptr() for p in wrapped.parameters() if p.grad is not None]
    return [any(begin <= place < end for begin, end in spaces) for place in places]


# -- the sums themselves --


def connected(group=None, size=1 << 24, timeout=30.0):
    group = group or dist.group.WORLD
    mine = core.SharedMemory(size)
    addresses = [mine.address()] * group.size()
    dist.all_gather_object(addresses, mine.address(), group=group)
    mine.connect(addresses, group.rank(), timeout)
    dist.barrier(group)
    return mine, core.SharedCollective(mine, 0)


def part_of(rank, numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * (rank + 0.3)).to(dtype)


def twin(world, numel, dtype, seed=0):
    """In the order of the ranks, in fp32 (fp64), rounded once."""
    compute = torch.promote_types(dtype, torch.float32)
    total = part_of(0, numel, dtype, seed).to(compute)
    for rank in range(1, world):
        total = total + part_of(rank, numel, dtype, seed).to(compute)
    return total.to(dtype)


def sums(rank, world, dtype, through_gloo):
    memory, shared = connected()
    for seed, numel in enumerate((1, 7, 1024, 65_537, 300_000)):
        flat = memory.make_flat(numel, dtype)
        assert not flat.any()
        flat.copy_(part_of(rank, numel, dtype, seed))
        shared.all_reduce(flat)
        assert torch.equal(flat, twin(world, numel, dtype, seed)), (numel, dtype)
        if through_gloo:
            other = part_of(rank, numel, dtype, seed)
            dist.all_reduce(other)
            assert torch.equal(flat, other), (numel, dtype)
        flat.fill_(rank)  # a script's business, which no other rank sees
        dist.barrier()
        assert (flat == rank).all()


@pytest.mark.slow(but=("2-dtype1",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_in_the_order_of_the_ranks(world, dtype):
    run_ranks(sums, world, dtype, world == 2)


def refuses_private_memory(rank, world):
    with pytest.raises(RuntimeError, match="fastsync bug"):
        connected()[1].all_reduce(torch.zeros(4))


def test_only_shared_buffers_are_summed():
    run_ranks(refuses_private_memory, 2)


def exchanges(rank, world, dtype, in_place):
    """Return what torch's collectives give, from memory that is read in place or copied before."""
    memory, shared = connected()
    make = memory.make_flat if in_place else lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    for seed, each in enumerate((1, 5, 300, 70_001)):
        sent = make(world * each, dtype)
        for _ in range(3):  # in the same memory
            sent.copy_(part_of(rank, world * each, dtype, seed))
            everyones = [part_of(r, world * each, dtype, seed) for r in range(world)]
            received = torch.empty_like(sent)
            shared.all_to_all(received, sent)
            assert torch.equal(received, torch.cat([x.chunk(world)[rank] for x in everyones]))
            mine = torch.empty(each, dtype=dtype)
            shared.reduce_scatter(mine, sent)
            assert torch.equal(mine, twin(world, world * each, dtype, seed).chunk(world)[rank])
            gathered = make(world * each, dtype)
            own = gathered.chunk(world)[rank]
            own.copy_(everyones[rank][:each])
            shared.all_gather(gathered, own)
            assert torch.equal(gathered, torch.cat([x[:each] for x in everyones]))
            own.zero_()  # at once: the others have read it
        seed += 1


@pytest.mark.slow(
    but=(
        "3-dtype0-in place",
        "3-dtype0-copied",
    )
)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_exchanges_are_those_of_torch(world, dtype, in_place):
    run_ranks(exchanges, world, dtype, in_place)


def leaves(rank, world):
    """Each rank goes as soon as it has read what it needs, often before the others have."""
    for seed in range(10):
        memory, shared = connected()
        everyones = [part_of(r, 1 << 18, torch.float32, seed) for r in range(world)]
        gathered = torch.zeros(world << 18)
        shared.all_gather(gathered, everyones[rank])
        del memory, shared
        assert torch.equal(gathered, torch.cat(everyones))


def test_what_is_still_read_outlives_the_rank_that_leaves():
    run_ranks(leaves, 3)


# -- training --


def train(wrapped, rank, dtype=torch.float32, steps=6):
    """Gradients of every step. Scripts do to them what they like, on each rank something else."""
    found = []
    for step in range(steps):
        wrapped.zero_grad(set_to_none=step % 2 == 0)
        if step == 3:
            with wrapped.no_sync():
                wrapped(inputs(rank, 50, dtype)).square().sum().backward()
        wrapped(inputs(rank, step, dtype)).square().sum().backward()
        found += gradients(wrapped)
        for index, param in enumerate(wrapped.parameters()):
            param.grad.mul_(rank + index).add_(rank)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0 + rank)
    return found


def both_ways(rank, world, options, dtype):
    ours = over("memory", lambda: FastDDP(net(dtype=dtype), **grouped(options)))
    theirs = over("group", lambda: FastDDP(net(dtype=dtype), **grouped(options)))
    alike = same(train(ours, rank, dtype), train(theirs, rank, dtype))
    return alike, all(in_memory(ours)), any(in_memory(theirs))


@pytest.mark.slow(but=("unused-dtype0",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.05}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "many buckets", "unused", "static"],
)
def test_two_ranks_get_the_bits_of_gloo(options, dtype):
    assert run_ranks(both_ways, 2, options, dtype) == [(True, True, False)] * 2


def without_views(rank, world):
    options = {"gradient_as_bucket_view": False}
    return both_ways(rank, world, options, torch.float32)


def test_gradients_that_are_no_views_get_the_bits_of_gloo_too():
    assert run_ranks(without_views, 2) == [(True, False, False)] * 2


def averages(rank, world):
    """Return the average, computed from every rank's own gradients."""
    wrapped = over("memory", lambda: FastDDP(net(), bucket_cap_mb=0.2))
    wrapped(inputs(rank, 0)).square().sum().backward()
    own = net()
    own(inputs(rank, 0)).square().sum().backward()
    everyones = [None] * world
    dist.all_gather_object(everyones, [p.grad * (1.0 / world) for p in own.parameters()])
    wanted = everyones[0]
    for theirs in everyones[1:]:
        wanted = [a + b for a, b in zip(wanted, theirs, strict=True)]
    return same(gradients(wrapped), wanted), all(in_memory(wrapped))


@pytest.mark.slow("4")
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_average_in_their_order(world):
    assert run_ranks(averages, world) == [(True, True)] * world


def in_nodes(rank, world, wire):
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wire = Wire(
        wire, form="hierarchical", node_group=nodes[rank // 2], cross_group=across[rank % 2]
    )
    ways = {}
    for way in ("memory", "group"):
        wrapped = over(way, lambda: FastDDP(net(), wire=wire, bucket_cap_mb=0.15))
        ways[way] = train(wrapped, rank, steps=4)
    return same(ways["memory"], ways["group"])


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["int8", "fp32"])
def test_nodes_sum_in_memory(wire):
    assert run_ranks(in_nodes, 4, wire) == [True] * 4
