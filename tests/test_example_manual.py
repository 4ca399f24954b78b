"""examples/manual_parallel.py: data parallelism by hand trains the weights that DDP trains."""

import pytest
import torch

from examples import manual_parallel as manual
from examples.common.check import judge, train
from examples.common.ranks import CheckFailed, Group
from fastsync.testing import run_ranks
from tests.scripts import run_module

BY_HAND = ("per parameter", "bucketed", "overlapped")
NAMES = [strategy.name for strategy in manual.STRATEGIES]


def mean_is_forgotten():
    torch.Tensor.div_ = lambda self, count: self  # nothing else in training divides in place


def only_buckets_go_wrong():
    """The last bucket is not sent."""
    send, begin = manual.average_buckets, manual.Overlap.__init__
    manual.average_buckets = lambda buckets: send(buckets[:-1])
    manual.Overlap.__init__ = lambda self, buckets: begin(self, buckets[:-1])


def weights_are_not_broadcast():
    manual.broadcast_weights = lambda module: None


def nothing():
    pass


def checked(rank, world, change=nothing):
    """The verdict on each strategy, or that it failed, and the all-reduces of a step."""
    group = Group(rank, world, torch.device("cpu"))
    work, by_name = manual.workload(group), {s.name: s for s in manual.STRATEGIES}
    expected = train(work, by_name["ddp"], group, "sgd", manual.CHECK_STEPS)
    change()
    verdicts = {}
    for name, strategy in by_name.items():
        trained = train(work, strategy, group, "sgd", manual.CHECK_STEPS)
        try:
            verdicts[name] = judge(strategy, trained, expected, group)
        except CheckFailed:
            verdicts[name] = "failed"
    return verdicts, [manual.all_reduces(s, group) for s in manual.STRATEGIES if change is nothing]


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(checked, 2)


def test_two_ranks_train_the_bits_of_ddp(on_two_ranks):
    for verdicts, _ in on_two_ranks:
        assert verdicts == dict.fromkeys(NAMES, "bit-identical") | {"no_sync": "not synchronised"}


def test_three_ranks_train_the_same_weights_but_for_the_order_of_sums():
    for verdicts, _ in run_ranks(checked, 3):
        assert "failed" not in verdicts.values()


def test_how_many_collectives(on_two_ranks):
    module = manual.build(0)
    buckets = manual.make_buckets(module.parameters(), manual.BUCKET_MB)
    assert 1 < len(buckets) < 10
    counted = dict(zip(NAMES, on_two_ranks[0][1], strict=True))
    assert counted.pop("no_sync") == 0
    assert counted.pop("per parameter") == len(list(module.parameters()))
    assert counted.pop("fastsync") == 0, "its ranks average in memory"
    assert set(counted.values()) == {len(buckets)}


@pytest.mark.parametrize(
    "change, broken",
    [
        (mean_is_forgotten, BY_HAND),
        (only_buckets_go_wrong, ("bucketed", "overlapped")),
        (weights_are_not_broadcast, BY_HAND),
    ],
)
def test_mistakes_are_noticed(change, broken):
    verdicts, _ = run_ranks(checked, 2, change)[0]
    assert [name for name in BY_HAND if verdicts[name] == "failed"] == list(broken)
    assert verdicts["fastsync"] == "bit-identical"


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
    for name in NAMES:
        assert ("not synchronised" if name == "no_sync" else "bit-identical") in rows[name]
