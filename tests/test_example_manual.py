"""examples/manual_parallel.py: data parallelism by hand trains the weights that DDP trains."""

import pytest
import torch

from examples import manual_parallel as manual
from examples.common.ranks import Group
from examples.common.text import Progress
from fastsync.testing import run_ranks
from tests.scripts import run_module

BY_HAND = ("per parameter", "bucketed", "overlapped")


def mean_is_forgotten():
    torch.Tensor.div_ = lambda self, count: self  # nothing else in training divides in place


def only_buckets_go_wrong():
    """One kind of bucket is not sent to its end, the other starts from the rank's own weights."""
    send = manual.average_buckets
    manual.average_buckets = lambda buckets: send(buckets[:-1])
    overlapped = manual.STRATEGIES["overlapped"]

    def without_broadcast(module):
        manual.broadcast_weights = lambda module: None
        return overlapped(module)

    manual.STRATEGIES["overlapped"] = without_broadcast


def nothing():
    pass


def checked(rank, world, change=nothing):
    change()
    group = Group(rank, world, torch.device("cpu"))
    return manual.check(group, Progress(group))


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(checked, 2)


def test_two_ranks_train_the_bits_of_ddp(on_two_ranks):
    for verdicts in on_two_ranks:
        assert set(verdicts) == set(manual.STRATEGIES)
        assert not verdicts[manual.FLOOR].alike
        for name in (*BY_HAND, "fastsync"):
            assert verdicts[name].alike, name
            assert verdicts[name].distance == 0, name


def test_three_ranks_train_the_same_weights_but_for_the_order_of_sums():
    for verdicts in run_ranks(checked, 3):
        assert all(v.good(3) for name, v in verdicts.items() if name != manual.FLOOR)


def test_how_many_collectives(on_two_ranks):
    verdicts = on_two_ranks[0]
    module = manual.build(0)
    buckets = manual.make_buckets(module.parameters(), manual.BUCKET_MB)
    assert verdicts[manual.FLOOR].collectives == 0
    assert verdicts["per parameter"].collectives == len(list(module.parameters()))
    assert 1 < len(buckets) < 10
    for name in ("bucketed", "overlapped", "ddp", "fastsync"):
        assert verdicts[name].collectives == len(buckets), name


@pytest.mark.parametrize(
    "change, broken",
    [(mean_is_forgotten, BY_HAND), (only_buckets_go_wrong, ("bucketed", "overlapped"))],
)
def test_mistakes_are_noticed(change, broken):
    verdicts = run_ranks(checked, 2, change)[0]
    assert [name for name in BY_HAND if not verdicts[name].good(2)] == list(broken)
    assert verdicts["fastsync"].good(2)


def test_buckets_hold_every_parameter_once_last_layers_first():
    params = list(manual.build(0).parameters())
    buckets = manual.make_buckets(params, 0.5)
    held = [id(p) for bucket in buckets for p in bucket.params]
    assert held == [id(p) for p in reversed(params)]
    for bucket in buckets[:-1]:
        assert sum(p.nbytes for p in bucket.params) >= 2**19


def test_the_command_prints_a_row_per_strategy():
    output = run_module("examples.manual_parallel", "--rounds", 2, "--steps", 1)
    rows = {line[:13].strip(): line for line in output.splitlines()}
    for name in manual.STRATEGIES:
        expected = "differ between ranks" if name == manual.FLOOR else "DDP's bits"
        assert expected in rows[name]
