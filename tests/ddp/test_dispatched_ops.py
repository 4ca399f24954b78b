"""Cost of a step in operations that pass torch's dispatcher."""

import pytest
import torch

from fastsync import FastDDP, ReplicaPolicy
from fastsync.config.arguments import grouped
from fastsync.testing import count_dispatched_ops, run_ranks
from tests.helpers.models import many

ALLOWED = 60


def count(rank, world, options, layers=100):
    torch.manual_seed(0)
    bare = many(layers)
    x = torch.randn(4, 64)

    def step(model):
        model.zero_grad()
        model(x).sum().backward()

    step(bare)
    alone = count_dispatched_ops(lambda: step(bare))
    model = FastDDP(bare, **grouped(options))
    for _ in range(3):  # the plan settles
        step(model)
    return alone, count_dispatched_ops(lambda: step(model))


def check(options, allowed=ALLOWED):
    for alone, wrapped in run_ranks(count, 2, options):
        assert alone > 5000, "the profiler saw the model"
        assert wrapped - alone <= allowed, f"{wrapped} operations against {alone} without sync"


def test_a_step_adds_few_operations():
    check({})


def count_with_groups(rank, world):
    counts = []
    for patterns in ((), ("1.*",), ("1.*", "4.*")):
        groups = {pattern: torch.distributed.new_group() for pattern in patterns}
        counts.append(count(rank, world, {"groups": groups}, layers=10)[1])
    return counts


def test_groups_add_at_most_five():
    without, one, two = run_ranks(count_with_groups, 2)[0]
    assert without - 5 <= one <= without + 5
    assert one <= two <= without + 10


@pytest.mark.slow
def test_nor_does_it_without_views_or_on_a_narrow_wire():
    check({"gradient_as_bucket_view": False})
    check({"wire": "bf16"})


@pytest.mark.slow
def test_nor_where_ranks_share_the_optimizers_state_over_a_network():
    for stage in (1, 2):
        check({"zero": stage, "shared_memory": False})
    check({"zero": 2, "shared_memory": False, "wire": "int8", "parameter_wire": "int8"})


@pytest.mark.slow
def test_comparing_replicas_adds_none():
    """But for the sum, where it is a collective of a process group: torch's name for it, and
    Gloo's."""
    for options, most in (({}, 0), ({"shared_memory": False}, 2)):
        plain, rarely, always = (
            run_ranks(count, 2, {"replicas": policy, **options})[0][1]
            for policy in (False, ReplicaPolicy(every=100), ReplicaPolicy(every=1))
        )
        assert plain == rarely <= always <= plain + most
