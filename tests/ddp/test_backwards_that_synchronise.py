"""Backwards that synchronise: those of a wrapper's own forwards, once each; others accumulate."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP
from tests.helpers.teams import run_ranks


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank, step=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def local(module, x):
    """Return the gradients that one backward alone computes."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    twin(x).sum().backward()
    return [p.grad for p in twin.parameters()]


def mean(module, world, step=0):
    """Return the average that all ranks would have."""
    rows = [local(module, batch(rank, step)) for rank in range(world)]
    return [sum(row[i] for row in rows) / world for i in range(len(rows[0]))]


def close(module, wanted):
    pairs = zip(module.parameters(), wanted, strict=True)
    return all(torch.allclose(p.grad, w, atol=1e-6) for p, w in pairs)


def wrapped_twice(rank, world):
    module = net()
    first, second = FastDDP(module), None
    right = []
    for step in range(6):
        second = second or (FastDDP(module) if step == 2 else None)
        model = first if second is None or step == 4 else second
        module.zero_grad()
        model(batch(rank, step)).sum().backward()
        right.append(close(module, mean(module, world, step)))
    counts = [model.sync_stats()["steps"] for model in (first, second)]
    return right, counts


@pytest.mark.slow("3")
@pytest.mark.parametrize("world", [2, 3])
def test_two_live_wrappers_of_the_same_parameters(world):
    for right, counts in run_ranks(wrapped_twice, world):
        assert all(right)
        assert counts == [3, 3], "each backward was synchronised by one of them"


def bare_work(rank, world, when):
    """Rank 0 alone works on the bare module; a collective of its own would hang or mispair."""
    warnings.simplefilter("ignore")
    module = net()
    model = FastDDP(module)
    right = []
    for step in range(4):
        module.zero_grad()
        mine = [torch.zeros_like(p) for p in module.parameters()]
        if rank == 0 and when == "before":
            module(batch(9)).sum().backward()
            mine = local(module, batch(9))
        model(batch(rank, step)).sum().backward()
        extra = [g / world for g in (local(module, batch(9)) if when == "before" else mine)]
        wanted = [m + e for m, e in zip(mean(module, world, step), extra, strict=True)]
        if rank == 0 and when == "after":
            module(batch(9)).mean().backward()
            penalty = torch.autograd.grad(module(batch(9)).sum(), list(module.parameters()))
            wanted = [w + g / 15 for w, g in zip(wanted, penalty, strict=True)]
        right.append(close(module, wanted))
    return right, model.sync_stats()["steps"]


@pytest.mark.slow("after")
@pytest.mark.parametrize("when", ["before", "after"])
def test_work_on_the_bare_module_stays_local(when):
    assert run_ranks(bare_work, 2, when, timeout=30) == [([True] * 4, 4)] * 2


def second_backward(rank, world):
    module = net()
    model = FastDDP(module)
    loss = model(batch(rank)).sum()
    loss.backward(retain_graph=True)
    averaged = close(module, mean(module, world))
    loss.backward()
    again = [m + g for m, g in zip(mean(module, world), local(module, batch(rank)), strict=True)]
    return averaged, close(module, again), model.sync_stats()["steps"]


def test_a_second_backward_through_the_same_graph_accumulates():
    assert run_ranks(second_backward, 2) == [(True, True, 1)] * 2


def many_forwards(rank, world, turned):
    module = net()
    model = FastDDP(module)
    losses = [model(batch(rank, step)).sum() for step in range(3)]
    steps = []
    for step in reversed(range(3)) if turned else range(3):
        module.zero_grad()
        losses[step].backward()
        steps.append(close(module, mean(module, world, step)))
    return steps, model.sync_stats()["steps"]


@pytest.mark.slow("False")
@pytest.mark.parametrize("turned", [False, True])
def test_several_forwards_before_their_backwards(turned):
    assert run_ranks(many_forwards, 2, turned) == [([True] * 3, 3)] * 2


def one_loss_of_two_forwards(rank, world):
    module = net()
    model = FastDDP(module)
    (model(batch(rank, 0)).sum() + model(batch(rank, 1)).sum()).backward()
    pairs = zip(mean(module, world, 0), mean(module, world, 1), strict=True)
    right = close(module, [one + other for one, other in pairs])
    module(batch(rank)).sum().backward()
    return right, model.sync_stats()["steps"]


def test_one_backward_may_take_several_forwards():
    assert run_ranks(one_loss_of_two_forwards, 2) == [(True, 1)] * 2


class Hidden(nn.Module):
    """Keeps its loss where no search of the outputs finds it."""

    def __init__(self, opaque):
        super().__init__()
        self.inner, self.opaque = net(), opaque

    def forward(self, x):
        y = self.inner(x)
        self.loss = y.sum()
        return object() if self.opaque else y


def bypass(rank, world, opaque):
    module = Hidden(opaque)
    model = FastDDP(module)
    right = []
    for step in range(3):
        module.zero_grad()
        model(batch(rank, step))
        module.loss.backward()
        right.append(close(module.inner, mean(module.inner, world, step)))
    module.zero_grad()
    module.inner(batch(rank)).sum().backward()
    right.append(close(module.inner, local(module.inner, batch(rank))))
    return right, model.sync_stats()["steps"]


@pytest.mark.slow("False")
@pytest.mark.parametrize("opaque", [False, True])
def test_a_loss_that_bypasses_the_outputs(opaque):
    assert run_ranks(bypass, 2, opaque) == [([True] * 4, 3)] * 2


def two_hidden_losses(rank, world):
    module = Hidden(opaque=True)
    model = FastDDP(module)
    losses = []
    for step in range(2):
        model(batch(rank, step))
        losses.append(module.loss)
    right = []
    for step, loss in enumerate(losses):
        module.zero_grad()
        loss.backward()
        right.append(close(module.inner, mean(module.inner, world, step)))
    return right, model.sync_stats()["steps"]


def test_several_forwards_without_any_tensor_in_their_outputs():
    assert run_ranks(two_hidden_losses, 2) == [([True, True], 2)] * 2


def forgotten_forward(rank, world):
    """A forward outside no_sync() whose backward never comes, then accumulation."""
    module = net()
    model = FastDDP(module)
    model(batch(rank))
    with model.no_sync():
        model(batch(rank, 1)).sum().backward()
    accumulated = close(module, local(module, batch(rank, 1)))
    model(batch(rank, 2)).sum().backward()
    pairs = zip(mean(module, world, 1), mean(module, world, 2), strict=True)
    return accumulated, close(module, [one + other for one, other in pairs])


def test_a_forward_whose_backward_never_comes_does_not_disturb_no_sync():
    assert run_ranks(forgotten_forward, 2) == [(True, True)] * 2


def late_accumulation(rank, world):
    """A no_sync() forward differentiated after a synchronising forward stays local."""
    module = net()
    model = FastDDP(module)
    with model.no_sync():
        early = model(batch(rank, 1)).sum()
    loss = model(batch(rank, 2)).sum()
    early.backward()
    accumulated = close(module, local(module, batch(rank, 1)))
    loss.backward()
    pairs = zip(mean(module, world, 1), mean(module, world, 2), strict=True)
    return accumulated, close(module, [one + other for one, other in pairs])


def test_a_backward_belongs_to_its_own_forward():
    assert run_ranks(late_accumulation, 2) == [(True, True)] * 2


def uneven_forwards(rank, world):
    """Only rank 1 accumulates, and only after the first step, when a new plan is due."""
    module = net()
    model = FastDDP(module)
    model(batch(rank)).sum().backward()
    if rank == 1:
        with model.no_sync():
            model(batch(rank)).sum().backward()
        model(batch(rank))  # nor does this one have a backward
    total = torch.ones(1)
    torch.distributed.all_reduce(total)  # the script's own, which must meet no other
    return total.item(), len(model._engine.plans)


def test_ranks_may_differ_in_their_forwards():
    assert run_ranks(uneven_forwards, 2, timeout=30) == [(2.0, 2)] * 2


class Sealed:
    """Outputs that no search for tensors looks into."""

    def __init__(self, loss):
        self.loss = loss


class Half(nn.Module):
    """Uses one of its two parameters, so that its bucket is not complete before the end."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.idle = nn.Linear(4, 3)

    def forward(self, x):
        return Sealed(self.used(x).sum())


def joint_backward(rank, world):
    models = [FastDDP(Half(), process_group=dist.new_group()) for _ in range(2)]
    right = []
    for step in range(4):
        order = models if rank == 0 else models[::-1]  # gradients of the last one come first
        sum(model(batch(rank, step)).loss for model in order).backward()
        wanted = sum(batch(other, step).sum(0) for other in range(world)) / world
        right += [torch.allclose(m.module.used.weight.grad[0], wanted, atol=1e-6) for m in models]
        for model in models:
            model.zero_grad()
    return right


def test_one_backward_through_two_wrappers_whose_ends_come_in_another_order_on_each_rank():
    for right in run_ranks(joint_backward, 2, timeout=60):
        assert all(right)
