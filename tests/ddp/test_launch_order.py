"""When buckets are sent: from step 1 on, in one order on all ranks, under plans that learn."""

import itertools
import warnings

import torch
import torch.distributed as dist
from torch import nn

from fastsync import FastDDP
from tests.helpers.models import many
from tests.helpers.teams import run_ranks


def order_of(model):
    return list(model._engine.plan.params)


def watch_first_backward(rank, world):
    """Return how many collectives had started when the gradient of the first layer came."""
    torch.manual_seed(0)
    model = FastDDP(many(6, 8), bucket_cap_mb=0.0003)
    early = []
    first = next(iter(model.parameters()))
    first.register_hook(lambda grad: early.append(model.sync_stats()["collectives"]))
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
    return early, len(model._engine.plan.buckets)


def test_overlap_from_the_first_step():
    for early, buckets in run_ranks(watch_first_backward, 2):
        assert buckets >= 4
        assert early[0] > 0
        assert early[2] - 2 * buckets >= buckets - 1, "all but the last bucket are on their way"


class Reordered(nn.Module):
    """Layers used in the order in which they are told to be, whatever they were registered as."""

    def __init__(self, count=6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x).tanh()
        return x.sum()


FORWARD = (0, 1, 2, 3, 4, 5)
BACKWARD = (5, 4, 3, 2, 1, 0)


def replan_after_one_step(rank, world):
    """Ranks run their layers in different orders: rank 0's is the one that counts."""
    model = FastDDP(Reordered(), bucket_cap_mb=1e-6)
    mine = (3, 1, 5, 0, 4, 2) if rank == 0 else FORWARD
    plans = []
    for _ in range(6):
        loss = model(torch.randn(2, 4), mine)
        plans.append(order_of(model))
        loss.backward()
    return plans


def test_the_second_plan_is_rank_0s_order():
    for plans in run_ranks(replan_after_one_step, 3):
        assert plans[0] == [5, 4, 3, 2, 1, 0], "reverse registration order first"
        assert plans[1:] == [[2, 4, 0, 5, 1, 3]] * 5


def change_order(rank, world, ranks):
    """After step 4 these ranks run their layers the other way round."""
    model = FastDDP(Reordered(), bucket_cap_mb=1e-6)
    plans = []
    for step in range(20):
        turned = step >= 4 and rank in ranks
        model(torch.randn(2, 4), BACKWARD if turned else FORWARD).backward()
        plans.append(order_of(model))
    return plans, model.sync_stats()["plans"]


def test_a_lasting_change_of_order_is_voted_into_a_new_plan():
    results = run_ranks(change_order, 2, (0, 1))
    for plans, count in results:
        assert plans[4] == [5, 4, 3, 2, 1, 0]
        assert plans[-1] == [0, 1, 2, 3, 4, 5]
        assert count == 3
    assert results[0] == results[1]


def test_a_rank_that_never_fits_does_not_cause_plans_for_ever():
    results = run_ranks(change_order, 2, (1,))
    assert results[0] == results[1]
    assert 2 <= results[0][1] <= 4, "the patience doubles with each plan"


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))

    def forward(self, x, order):
        return sum(self.layers[i](x).square().sum() for i in order)


def branch_by_rank(rank, world):
    """Every step each rank uses its own layers, in its own order; a mix-up of buckets shows."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branching(), bucket_cap_mb=1e-6)
    orders = list(itertools.permutations(range(6), 4))
    wrong = []
    for step in range(30):
        model.zero_grad()
        mine = orders[(37 * step + 101 * rank) % len(orders)]
        x = torch.full((1, 4), float(rank + 1))
        model(x, mine).backward()
        local = [torch.zeros(4, 4) for _ in range(6)]
        for index in mine:
            weight = model.module.layers[index].weight.detach().requires_grad_()
            (nn.functional.linear(x, weight).square().sum()).backward()
            local[index] = weight.grad
        for index, grad in enumerate(local):
            dist.all_reduce(grad)
            got = model.module.layers[index].weight.grad
            average = grad / world
            if not torch.allclose(average if got is None else got, average, rtol=1e-5):
                wrong.append((step, index))
    plans = [None] * world
    dist.all_gather_object(plans, order_of(model))
    return wrong, plans


def test_one_order_on_all_ranks_whatever_each_does():
    for wrong, plans in run_ranks(branch_by_rank, 3):
        assert not wrong
        assert plans == [plans[0]] * 3


def add_frozen_buckets(rank, world):
    """A bucket whose parameters are all unused goes out at the end, and in its turn."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branching(), bucket_cap_mb=1e-6)
    counts = []
    for layer in model.module.layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: counts.append(model.sync_stats()["collectives"])
        )
    model(torch.ones(1, 4), (0, 1, 2, 3, 4)).backward()  # layer 5, first in the plan, is missing
    return counts, model.sync_stats()["collectives"]


def test_nothing_overtakes_a_missing_bucket():
    for counts, total in run_ranks(add_frozen_buckets, 2):
        assert counts == [0] * 5
        assert total == 6
