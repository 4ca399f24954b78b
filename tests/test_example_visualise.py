"""examples/visualise.py: what it shows is what the ranks hold and send."""

import pytest
import torch

from examples import manual_parallel, visualise
from examples.common.ranks import CheckFailed, Group
from fastsync.testing import run_ranks
from tests.scripts import run_module


def sends_half():
    send = manual_parallel.average_buckets
    manual_parallel.average_buckets = lambda buckets: send(buckets[: len(buckets) // 2])


def taken(rank, world, change=lambda: None):
    change()
    group = Group(rank, world, torch.device("cpu"))
    try:
        return [visualise.observe(name, group) for name in visualise.SHOWN]
    except CheckFailed as error:
        return str(error)


@pytest.fixture(scope="module")
def runs():
    return run_ranks(taken, 2)[0]


def test_gradients_that_do_not_travel_are_noticed():
    assert "bucketed sent" in run_ranks(taken, 2, sends_half)[0]


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
    backward, sent = visualise.Run("x", (message,), 0.5, 1.0).lanes(1.0)
    assert backward == "=" * 33
    assert sent == " " * 32 + "0" * 32


def test_the_command():
    output = run_module("examples.visualise")
    assert "0.0.weight" in output
    for name in visualise.SHOWN:
        assert f"  {name:<14}|==" in output
