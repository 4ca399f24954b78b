"""examples/visualise.py: what it shows is what the ranks hold and send."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from examples import synchronisation
from examples.common.ranks import Group
from examples.visualise import averages, lanes, strip
from examples.visualise_page import page, shade, stacked
from fastsync.testing import run_ranks
from tests.scripts import run_module


def forgets_to_divide():
    torch.Tensor.div_ = lambda self, count: self


def taken(rank, world, change=None):
    if change is not None:
        change()
    return synchronisation.take_picture(Group(rank, world, torch.device("cpu")))


@pytest.fixture(scope="module")
def picture():
    return run_ranks(taken, 2)[0]


def test_every_strategy_averages(picture):
    assert [run.strategy for run in picture.runs] == list(synchronisation.STRATEGIES)
    assert averages(picture)


def test_sums_that_are_no_averages_are_noticed():
    assert not averages(run_ranks(taken, 2, forgets_to_divide)[0])


def test_the_strips_after_are_the_means_of_those_before(picture):
    for parameter in picture.parameters:
        before, after = torch.tensor(parameter.before), torch.tensor(parameter.after)
        assert not torch.equal(before[0], before[1]), parameter.name
        assert torch.equal(after[0], after[1]), parameter.name
        assert torch.allclose(after[0], before.mean(0), rtol=1e-4, atol=1e-7), parameter.name


def test_every_gradient_travels_once(picture):
    names = sorted(parameter.name for parameter in picture.parameters)
    size = sum(parameter.size for parameter in picture.parameters)
    for run in picture.runs:
        assert sorted(n for message in run.messages for n in message.names) == names
        assert sum(message.size for message in run.messages) == size
        assert all(0 < message.start < message.end <= run.total for message in run.messages)
        assert run.exposed > 0


def test_what_distinguishes_the_strategies(picture):
    runs = {run.strategy: run for run in picture.runs}
    assert len(runs["per parameter"].messages) == len(picture.parameters)
    for name in ("bucketed", "overlapped", "ddp", "fastsync"):
        assert len(runs[name].messages) == len(runs["bucketed"].messages) == 3
    for name in ("per parameter", "bucketed"):
        assert runs[name].messages[0].start > runs[name].backward
    for name in ("overlapped", "ddp", "fastsync"):
        assert runs[name].messages[0].start < runs[name].backward


class References(HTMLParser):
    """Attributes that would fetch something, and elements that would run something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [v for k, v in attributes if k in ("src", "href", "xlink:href", "data")]
        self.found += [tag] if tag in ("script", "link", "iframe", "object") else []


def test_the_page_stands_alone_and_shows_everything(picture):
    html = page(picture)
    references = References()
    references.feed(html)
    assert references.found == []
    assert not re.search(r"url\(|@import|https?:", html)
    drawings = [ElementTree.fromstring(d) for d in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    assert len(drawings) == 3
    hovers = [title.text for title in drawings[2].iter("title")]
    for run in picture.runs:
        for message in run.messages:
            assert any(hover.endswith(": " + ", ".join(message.names)) for hover in hovers)
    for parameter in picture.parameters:
        assert f">{parameter.name}</text>" in html
        assert html.count(f"<title>{parameter.before[0][7]:.2e}</title>") >= 1


def test_drawing():
    assert shade(0.0, 1.0) == "#ffffff"
    assert shade(1.0, 1.0) == "#c43c28"
    assert strip((-1.0,) * 8 + (1.0,) * 8, 1.0) == "▁" * 8 + "█" * 8
    message = synchronisation.Message
    a, b, c = message(("a",), 4, 0, 2), message(("b",), 4, 1, 3), message(("c",), 4, 2, 4)
    assert stacked((a, b, c)) == [(0, a), (1, b), (0, c)]
    run = synchronisation.Run("x", (message(("a",), 4, 0.5, 1.0),), 0.5, 1.0, 0.0)
    backward, sent = lanes(run, 1.0)
    assert backward == "=" * 33
    assert sent == " " * 32 + "0" * 32


def test_the_command(tmp_path):
    output = run_module("examples.visualise", "--page", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines()}
    assert rows["0.0.weight"][1] == "512x256"
    assert rows["fastsync"][1:3] == ["3", "2.12"]
