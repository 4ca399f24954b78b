"""examples/visualise.py: what it shows is what the ranks hold and send."""

import pytest
import torch

from examples import manual_parallel, visualise
from examples.common.ranks import Group
from fastsync.testing import run_ranks
from tests.scripts import run_module


def forgets_to_divide():
    torch.Tensor.div_ = lambda self, count: self


def taken(rank, world, change=None):
    if change is not None:
        change()
    return visualise.observe_all(Group(rank, world, torch.device("cpu")))


@pytest.fixture(scope="module")
def runs():
    return run_ranks(taken, 2)[0]


def test_every_strategy_averages(runs):
    assert [run.strategy for run in runs] == list(visualise.SHOWN)
    assert visualise.averaged(runs)


def test_sums_that_are_no_averages_are_noticed():
    assert not visualise.averaged(run_ranks(taken, 2, forgets_to_divide)[0])


def test_every_gradient_travels_once(runs):
    named = dict(manual_parallel.build(0).named_parameters())
    names, size = sorted(named), sum(p.nbytes for p in named.values())
    for run in runs:
        if run.strategy in ("ddp", "fastsync"):
            assert sorted(n for message in run.messages for n in message.names) == names
        assert sum(message.size for message in run.messages) == size
        assert all(0 < message.start < message.end <= run.total for message in run.messages)
        assert run.total > run.backward


def test_what_distinguishes_the_strategies(runs):
    by_name = {run.strategy: run for run in runs}
    params = list(manual_parallel.build(0).parameters())
    buckets = manual_parallel.make_buckets(params, manual_parallel.BUCKET_MB)
    assert len(by_name["per parameter"].messages) == len(params)
    for name in ("bucketed", "overlapped", "ddp", "fastsync"):
        assert len(by_name[name].messages) == len(buckets) < 10
    for name in ("per parameter", "bucketed"):
        assert by_name[name].messages[0].start > by_name[name].backward
    for name in ("overlapped", "ddp", "fastsync"):
        assert by_name[name].messages[0].start < by_name[name].backward


def test_drawing():
    message = visualise.Message(("a",), 4, 0.5, 1.0)
    backward, sent = visualise.Run("x", (message,), 0.5, 1.0, 0.0).lanes(1.0)
    assert backward == "=" * 33
    assert sent == " " * 32 + "0" * 32


def test_the_command():
    output = run_module("examples.visualise")
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert "0.0.weight" in output
    assert rows["fastsync"][1:3] == ["6", "6.32"]
