"""Ranks that share memory: those that die or stay away, forked children, and who shares at all."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastsync import FastDDP
from fastsync.config.arguments import grouped
from fastsync.reducer import core, shared_memory
from fastsync.reducer.shared_memory import share_memory
from fastsync.testing import run_ranks
from tests.ddp.test_shared_memory import connected, gradients, in_memory, inputs, net, over, same

# -- faults --


def unlike(rank, world):
    memory, shared = connected(timeout=2.0)
    flat = memory.make_flat(10 + rank, torch.float32)
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


# -- forks --


def child_spoils(wrapped):
    """A forked child writes to gradients and frees them; another child of it does, too."""
    first = wrapped.module[0].weight.grad
    first.zero_()
    if os.fork() == 0:
        assert not first.any()  # its parent's pages, not the rank's
        wrapped.module[2].weight.grad.fill_(7.0)
        os._exit(0)
    assert os.wait()[1] == 0
    for param in wrapped.parameters():
        param.grad = None
    del first


def forks(rank, world):
    wrapped = over("memory", lambda: FastDDP(net()))
    wrapped(inputs(rank, 0)).square().sum().backward()
    before = gradients(wrapped)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            child_spoils(wrapped)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    kept = same(gradients(wrapped), before)
    wrapped.zero_grad()
    wrapped(inputs(rank, 0)).square().sum().backward()
    return status, kept, same(gradients(wrapped), before), all(in_memory(wrapped))


def test_what_a_forked_child_does_to_gradients_stays_there():
    assert run_ranks(forks, 2) == [(0, True, True, True)] * 2


def evaluates_in_a_fork(rank, world, stage):
    """A forked child reads the parameters after its rank has changed them."""
    wrapped = over("memory", lambda: FastDDP(net(), zero=stage))
    optimizer = torch.optim.SGD(wrapped.parameters(), 1e-2)

    def step(number):
        optimizer.zero_grad()
        wrapped(inputs(rank, number)).square().sum().backward()
        optimizer.step()

    step(0)
    before = [param.detach().clone() for param in wrapped.parameters()]
    changed, change = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(changed, 1)
        os._exit(0 if same(list(wrapped.parameters()), before) else 1)
    step(1)
    os.write(change, b"!")
    moved = not same(list(wrapped.parameters()), before)
    return os.waitpid(child, 0)[1], moved


@pytest.mark.slow("0", "1")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forked_child_keeps_the_parameters_of_its_fork(stage):
    assert run_ranks(evaluates_in_a_fork, 2, stage) == [(0, True)] * 2


# -- the choice --


def choice(rank, world, spoil):
    """Return whether memory is shared, and what is logged."""
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

    core.SharedMemory = make_memory


def no_mapping():
    class Strange:
        def __init__(self, size):
            self._real = made(size)

        def address(self):
            return self._real.address()

        def connect(self, *args):
            raise RuntimeError("/proc/1/fd/3: Permission denied")

    made = core.SharedMemory
    core.SharedMemory = Strange


def elsewhere():
    shared_memory.network_space = lambda: "another machine"


@pytest.mark.slow(but=("no_memory-on rank 2, memfd_create: Operation not permitted",))
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (nothing, ""),
        (switched_off, "on rank 2, FASTSYNC_SHM is 0"),
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


def by_argument(rank, world):
    os.environ.pop("FASTSYNC_SHM", None)
    ways = []
    for options in ({}, {"shared_memory": False}, {"wire": "bf16"}, {"wire": "int8"}, {"zero": 1}):
        wrapped = FastDDP(net(), **grouped(options))
        wrapped(inputs(rank, 0)).sum().backward()
        ways.append(Path("/proc/self/maps").read_text().count("memfd:fastsync"))
        del wrapped
    return ways


def test_an_argument_says_no():
    world = 2
    for plain, refused, bf16, int8, zero in run_ranks(by_argument, world):
        assert plain == bf16 == int8 == zero == world
        assert refused == 0


def alone(rank, world):
    return share_memory(dist.group.WORLD, 1 << 20) is None


def test_one_rank_shares_nothing():
    assert run_ranks(alone, 1) == [True]
