"""Process groups that torch.distributed did not make, or does not know: steps equal DDP's bits."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from fastsync import FastDDP, RankMismatchError, Wire
from fastsync.config.arguments import grouped
from fastsync.testing import run_ranks
from tests.helpers.models import batch, build, differences, loss_of, state, wrap


class Forwarding(dist.ProcessGroup):
    """A group written in Python, as elastic libraries write theirs."""

    def __init__(self, group):
        super().__init__(group.rank(), group.size())
        self.group = group
        self.calls = []

    def getBackendName(self):
        return "forwarding"

    def allreduce(self, tensors, options=None):
        self.calls.append("allreduce")
        return self.group.allreduce(tensors, options or dist.AllreduceOptions())

    def allgather(self, outputs, inputs, options=None):
        self.calls.append("allgather")
        return self.group.allgather(outputs, inputs, options or dist.AllgatherOptions())

    def broadcast(self, tensors, options=None):
        self.calls.append("broadcast")
        return self.group.broadcast(tensors, options or dist.BroadcastOptions())


def unregistered():
    """A group over Gloo that torch.distributed has never heard of."""
    store = PrefixStore("unregistered", dist.distributed_c10d._get_default_store())
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.ProcessGroup(PrefixStore("group", store), rank, world)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def debugged():
    """A new group whose backend torch wraps, to check what the ranks do."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return dist.new_group([0, 1])


GROUPS = {
    "python": lambda: Forwarding(dist.group.WORLD),
    "python over unregistered": lambda: Forwarding(unregistered()),
    "unregistered": unregistered,
    "debugged": debugged,
    "registered": lambda: dist.new_group([0, 1]),
}


def trained(kind, group, rank, **options):
    wrapped = wrap(kind, build("conv"), process_group=group, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    steps = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(wrapped(batch("conv", 10 * step + rank))).backward()
        optimizer.step()
        steps.append(state(wrapped.module))
    return steps


def compare(rank, world, name, options):
    group = GROUPS[name]()
    ours = trained("fast", group, rank, bucket_cap_mb=0.001, **options)
    sent = list(getattr(group, "calls", ()))
    # DDP crashes over a wrapped group that is made after the debug level was raised.
    theirs = trained("torch", None if name == "debugged" else group, rank)
    return [differences(a, b) for a, b in zip(ours, theirs, strict=True)], sent.count("allreduce")


@pytest.mark.slow(but=("static graph-unregistered",))
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static graph"])
def test_steps_equal_ddp(name, options):
    for found, all_reduces in run_ranks(compare, 2, name, options):
        assert found == [[]] * 5
        assert (all_reduces > 5) == name.startswith("python"), "not sent through the group"


def different(rank, world, name):
    group = GROUPS[name]()
    with pytest.raises(RankMismatchError) as caught:
        FastDDP(nn.Linear(2, 2 + rank), process_group=group)
    return str(caught.value)


@pytest.mark.slow("python")
@pytest.mark.parametrize("name", ["python", "unregistered"])
def test_a_difference_is_named(name):
    for text in run_ranks(different, 2, name):
        assert "'weight'" in text and "shape" in text


def refused(rank, world, name, options):
    group = GROUPS[name]()
    with pytest.raises(ValueError) as caught:
        FastDDP(nn.Linear(64, 64), process_group=group, **grouped(options))
    return str(caught.value)


@pytest.mark.slow(but=("wire-python",))
@pytest.mark.parametrize("name", ["python", "unregistered"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire": "int8"}, "wire='int8' needs process groups beside this one"),
        ({"timeline": True}, "timeline= brings the ranks together through the store"),
    ],
    ids=["wire", "timeline"],
)
def test_what_needs_more_than_a_group_says_so(name, options, words):
    for text in run_ranks(refused, 2, name, options):
        assert words in text and "new_group()" in text


NATIVE = Wire("bf16", form="native")


def narrow(rank, world):
    """A wire that the backend sums needs no group of its own; and groups come and go."""
    grads = []
    for _ in range(2):
        model = FastDDP(nn.Linear(2, 1), process_group=Forwarding(dist.group.WORLD), wire=NATIVE)
        model(torch.full((1, 2), float(rank))).sum().backward()
        grads.append(model.module.weight.grad.tolist())
        del model
    return grads


def test_groups_come_and_go():
    assert run_ranks(narrow, 2) == [[[[0.5, 0.5]]] * 2] * 2


def moved(rank, world):
    """`_update_process_group`, as elastic trainers call it."""
    model = FastDDP(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    group = Forwarding(unregistered())
    model._update_process_group(group)
    model.zero_grad()
    model(torch.full((1, 2), float(rank))).sum().backward()
    return model.module.weight.grad.tolist(), "allreduce" in group.calls


def test_another_group_may_take_over():
    assert run_ranks(moved, 2) == [([[0.5, 0.5]], True)] * 2


FAKE = """
import torch, torch.distributed as dist
from fastsync import FastDDP
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
model = FastDDP(torch.nn.Linear(3, 2))
bias = model.module.bias
for trained in (True, False, True, True):
    bias.requires_grad_(trained)
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert (model.module.weight.grad == 0.25).all()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_fake_group_as_tests_and_simulators_use_it():
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
