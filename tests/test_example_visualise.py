"""examples/visualise.py: what it shows is what the ranks hold and send."""

import math

import pytest
import torch

from examples import visualise
from examples.common.ranks import Group
from examples.visualise import strip
from fastsync.testing import run_ranks
from tests.scripts import run_module


def forgets_to_divide():
    torch.Tensor.div_ = lambda self, count: self


def taken(rank, world, change=None):
    if change is not None:
        change()
    return visualise.take_picture(Group(rank, world, torch.device("cpu")))


@pytest.fixture(scope="module")
def picture():
    return run_ranks(taken, 2)[0]


def test_every_strategy_averages(picture):
    assert [run.strategy for run in picture.runs] == list(visualise.SHOWN)
    assert picture.averaged


def test_sums_that_are_no_averages_are_noticed():
    assert not run_ranks(taken, 2, forgets_to_divide)[0].averaged


def test_the_strips_after_are_the_means_of_those_before(picture):
    for parameter in picture.parameters:
        before, after = torch.tensor(parameter.before), torch.tensor(parameter.after)
        assert not torch.equal(before[0], before[1]), parameter.name
        assert torch.equal(after[0], after[1]), parameter.name
        assert torch.allclose(after[0], before.mean(0), rtol=1e-4, atol=1e-7), parameter.name


def test_every_gradient_travels_once(picture):
    names = sorted(parameter.name for parameter in picture.parameters)
    size = 4 * sum(math.prod(parameter.shape) for parameter in picture.parameters)
    for run in picture.runs:
        if run.strategy in ("ddp", "fastsync"):
            assert sorted(n for message in run.messages for n in message.names) == names
        assert sum(message.size for message in run.messages) == size
        assert all(0 < message.start < message.end <= run.total for message in run.messages)
        assert run.total > run.backward


def test_what_distinguishes_the_strategies(picture):
    runs = {run.strategy: run for run in picture.runs}
    assert len(runs["per parameter"].messages) == len(picture.parameters)
    for name in ("bucketed", "overlapped", "ddp", "fastsync"):
        assert len(runs[name].messages) == len(runs["bucketed"].messages) == 3
    for name in ("per parameter", "bucketed"):
        assert runs[name].messages[0].start > runs[name].backward
    for name in ("overlapped", "ddp", "fastsync"):
        assert runs[name].messages[0].start < runs[name].backward


def test_drawing():
    assert strip((-1.0,) * 8 + (1.0,) * 8, 1.0) == "▁" * 8 + "█" * 8
    message = visualise.Message(("a",), 4, 0.5, 1.0)
    backward, sent = visualise.Run("x", (message,), 0.5, 1.0, 0.0).lanes(1.0)
    assert backward == "=" * 33
    assert sent == " " * 32 + "0" * 32


def test_the_command():
    output = run_module("examples.visualise")
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert rows["0.0.weight"][1] == "512x256"
    assert rows["fastsync"][1:3] == ["3", "3.18"]
