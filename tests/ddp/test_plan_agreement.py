"""Agreement of ranks before they make a plan."""

import torch
import torch.distributed as dist

from fastsync.config.topology import Network
from fastsync.reducer.agreement import PlanFacts, agree_on_plan
from tests.helpers.teams import run_ranks

CPU = torch.device("cpu")


def different_views(rank, world, latency):
    trained = [rank == 1, False, rank == 0, True]
    order = [3, 2] if rank == 0 else [0, 3, 2]
    mine = PlanFacts(trained, order, Network(1e6 * (rank + 1), latency * (rank + 1)))
    return agree_on_plan(mine, dist.group.WORLD, CPU)


def test_any_rank_trains_the_first_one_orders_and_the_fastest_has_measured():
    for agreed in run_ranks(different_views, 3, 0.25):
        assert agreed == PlanFacts([True, False, True, True], [3, 2], Network(3e6, 0.25))


def test_a_latency_that_nobody_knows_is_measured_and_the_same_on_all_ranks():
    first, *others = run_ranks(different_views, 3, 0.0)
    assert first.network.latency > 0
    assert all(other == first for other in others)


def nothing_measured(rank, world):
    return agree_on_plan(PlanFacts([True], [0], Network()), dist.group.WORLD, CPU)


def test_no_latency_is_measured_where_no_rate_is():
    for agreed in run_ranks(nothing_measured, 2):
        assert agreed == PlanFacts([True], [0], Network())


def alone(rank, world):
    mine = PlanFacts([True], [0], Network(5.0))
    return agree_on_plan(mine, dist.group.WORLD, CPU) is mine


def test_a_single_rank_agrees_with_itself():
    assert run_ranks(alone, 1) == [True]
