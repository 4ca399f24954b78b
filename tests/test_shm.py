"""Averages of ranks that share a machine, through memory that they map."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP
from fastsync.engine import core, memory
from fastsync.engine.memory import share_memory
from fastsync.testing import RankError, run_ranks

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
    """Whatever `wrap()` makes, with gradients through shared memory or through the group."""
    os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[way]
    return wrap()


def in_memory(wrapped):
    """How much of the gradients lies in this process's shared memory."""
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
    mine = core.make_memory(size)
    addresses = [mine.address()] * group.size()
    dist.all_gather_object(addresses, mine.address(), group=group)
    mine.connect(addresses, group.rank(), timeout)
    dist.barrier(group)
    return mine


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
    shared = connected()
    for seed, numel in enumerate((1, 7, 1024, 65_537, 300_000)):
        flat = shared.make_flat(numel, dtype)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_in_the_order_of_the_ranks(world, dtype):
    run_ranks(sums, world, dtype, world == 2)


def refuses_private_memory(rank, world):
    with pytest.raises(RuntimeError, match="fastsync bug"):
        connected().all_reduce(torch.zeros(4))


def test_only_shared_buffers_are_summed():
    run_ranks(refuses_private_memory, 2)


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
    ours = over("memory", lambda: FastDDP(net(dtype=dtype), **options))
    theirs = over("group", lambda: FastDDP(net(dtype=dtype), **options))
    alike = same(train(ours, rank, dtype), train(theirs, rank, dtype))
    return alike, all(in_memory(ours)), any(in_memory(theirs))


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
    """What the average is, from every rank's own gradients."""
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


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_average_in_their_order(world):
    assert run_ranks(averages, world) == [(True, True)] * world


def several(rank, world):
    """Two models in one backward, and one of them alone; the third is gone before the end."""
    ways = {}
    for way in ("memory", "group"):
        a, b = (over(way, lambda s=s: FastDDP(net(s), bucket_cap_mb=0.1)) for s in (1, 2))
        found = []
        for step in range(4):
            third = over(way, lambda: FastDDP(net(3)))
            third(inputs(rank, step)).sum().backward()
            found += gradients(third)
            del third
            a.zero_grad(), b.zero_grad()
            b(a(inputs(rank, step))).square().sum().backward()
            b(inputs(rank, step)).sum().backward()
            found += gradients(a) + gradients(b)
        ways[way] = found
    return same(ways["memory"], ways["group"])


def test_several_models_do_not_mix():
    assert run_ranks(several, 2) == [True] * 2


class Ordered(nn.Module):
    """Layers in an order of the forward's, so that plans change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.backwards = False

    def forward(self, x):
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = layer(x).tanh()
        return x


def replanning(rank, world):
    found, plans = {}, {}
    for way in ("memory", "group"):
        wrapped = over(way, lambda: FastDDP(Ordered(), bucket_cap_mb=0.15))
        found[way] = []
        for step in range(24):
            wrapped.module.backwards = step >= 6
            wrapped.module.layers[2].requires_grad_(step < 12 or step >= 18)
            wrapped.zero_grad()
            wrapped(inputs(rank, step)).square().sum().backward()
            found[way] += gradients(wrapped)
        plans[way] = wrapped.sync_stats().plans
    return same(found["memory"], found["group"]), plans["memory"]


def test_plans_and_what_is_trained_may_change():
    for alike, plans in run_ranks(replanning, 2):
        assert alike
        assert plans >= 3


def keeps(rank, world):
    wrapped = over("memory", lambda: FastDDP(net()))
    kept = []
    for step in range(5):
        wrapped.zero_grad()
        wrapped(inputs(rank, step)).sum().backward()
        kept += [(p.grad, p.grad.clone()) for p in wrapped.parameters()]
    return all(torch.equal(grad, copy) for grad, copy in kept)


def test_gradients_that_a_script_keeps_keep_their_values():
    assert run_ranks(keeps, 3) == [True] * 3


def uneven(rank, world):
    found = {}
    for way in ("memory", "group"):
        wrapped = over(way, lambda: FastDDP(net()))
        with wrapped.join():
            for step in range(2 + 3 * rank):
                wrapped.zero_grad()
                wrapped(inputs(rank, step)).sum().backward()
        found[way] = gradients(wrapped)
    return same(found["memory"], found["group"])


def test_ranks_that_have_joined_take_part():
    assert run_ranks(uneven, 2) == [True] * 2


# -- faults --


def dies(rank, world, victim, folder):
    logging.disable()
    wrapped = over("memory", lambda: FastDDP(net(), bucket_cap_mb=0.05))
    for step in range(50):
        wrapped.zero_grad()
        loss = wrapped(inputs(rank, step)).square().sum()
        if rank == victim and step == 4:
            # In the middle of a backward, with buckets sent and others still to come.
            def die(_):
                os.kill(os.getpid(), signal.SIGKILL)

            wrapped.module[2].weight.register_hook(die)
        try:
            loss.backward()
        except RuntimeError as error:
            Path(folder, str(rank)).write_text(str(error))
            return


@pytest.mark.parametrize(("world", "victim"), [(2, 0), (2, 1), (3, 2)])
def test_a_killed_rank_is_named(world, victim, tmp_path):
    before = sorted(os.listdir("/dev/shm"))
    with pytest.raises(RankError, match=f"rank {victim} was killed by SIGKILL"):
        run_ranks(dies, world, victim, str(tmp_path), grace=5.0)
    for rank in set(range(world)) - {victim}:
        text = (tmp_path / str(rank)).read_text()
        assert f"rank {rank}, " in text
        # The first to find out may have ended before the others look.
        assert " ended while rank " in text
        assert str(victim) in text.split(" ended while")[0].rsplit("rank", 1)[1]
    left = [name for name in os.listdir("/dev/shm") if name not in before]
    assert not [name for name in left if "fastsync" in name]


def stopped(rank, world):
    shared = connected(timeout=1.0)
    flat = shared.make_flat(10, torch.float32)
    if rank == 1:
        time.sleep(3.0)
        return ""
    with pytest.raises(RuntimeError) as caught:
        shared.all_reduce(flat)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    text = run_ranks(stopped, 2)[0]
    assert "rank 0 waited 1 s for a sum over ranks, but rank 1 did not come" in text


def unlike(rank, world):
    shared = connected(timeout=2.0)
    flat = shared.make_flat(10 + rank, torch.float32)
    with pytest.raises(RuntimeError) as caught:
        shared.all_reduce(flat)
    return str(caught.value)


def test_ranks_with_other_buffers_are_an_error():
    assert any("do they train the same model?" in text for text in run_ranks(unlike, 2))


def nothing_is_left(rank, world):
    wrapped = over("memory", lambda: FastDDP(net()))
    wrapped(inputs(rank, 0)).sum().backward()
    assert all(in_memory(wrapped))
    names = [name for name in os.listdir("/dev/shm") if "fastsync" in name]
    kept = wrapped.module[0].weight.grad
    values = kept.clone()
    del wrapped
    return names, torch.equal(kept, values)


def test_nothing_appears_in_dev_shm_and_gradients_outlive_their_wrapper():
    assert run_ranks(nothing_is_left, 2) == [([], True)] * 2


# -- the choice --


def choice(rank, world, spoil):
    """Whether memory is shared, and what is logged."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("fastsync")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    os.environ["FASTSYNC_SHM"] = "1"
    if rank == world - 1:
        spoil()
    shared = share_memory(dist.group.WORLD, 1 << 20)
    return shared is not None, lines


def nothing():
    pass


def switched_off():
    os.environ["FASTSYNC_SHM"] = "0"


def no_memory():
    def make_memory(size):
        raise RuntimeError("memfd_create: Operation not permitted")

    core.make_memory = make_memory


def no_mapping():
    class Strange:
        def __init__(self, size):
            self._real = made(size)

        def address(self):
            return self._real.address()

        def connect(self, *args):
            raise RuntimeError("/proc/1/fd/3: Permission denied")

    made = core.make_memory
    core.make_memory = Strange


def elsewhere():
    memory._host = lambda: "another machine"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (nothing, ""),
        (switched_off, "on rank 2, FASTSYNC_SHM is not 1"),
        (no_memory, "on rank 2, memfd_create: Operation not permitted"),
        (no_mapping, "rank 2 cannot map the others' memory: /proc/1/fd/3: Permission denied"),
        (elsewhere, "the ranks are on several machines"),
    ],
)
def test_all_ranks_choose_alike_and_the_first_says_what(spoil, reason):
    found = run_ranks(choice, 3, spoil)
    assert [shares for shares, _ in found] == [not reason] * 3
    way = f"the process group: {reason}" if reason else "memory that the ranks share"
    assert [lines for _, lines in found] == [[f"fastsync: gradients travel through {way}"], [], []]


def alone(rank, world):
    return share_memory(dist.group.WORLD, 1 << 20) is None


def test_one_rank_shares_nothing():
    assert run_ranks(alone, 1) == [True]
