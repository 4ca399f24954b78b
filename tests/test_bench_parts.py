"""What benchmarks compute from what they measure."""

import mmap
import multiprocessing
import os
from xml.etree import ElementTree

import pytest
import torch

from bench.commands.charged import charged
from bench.measure.codecs import CODEC_CASES
from bench.measure.transfers import CASES
from bench.models import WORKLOADS
from bench.report.charts import Labels, Line, line_chart, nice_marks
from bench.report.formulas import bucketed, finish, least_exposed
from examples.common import variants
from examples.common.ranks import CheckFailed
from examples.common.rounds import Measured, summarise
from examples.common.text import Spread
from fastsync.wire.formats import FORMATS


def test_the_least_exposed_time_is_the_largest_tail():
    ready, durations = [0.1, 0.2, 0.5], [0.3, 0.1, 0.2]
    tails = [at + sum(durations[i:]) for i, at in enumerate(ready)]
    assert finish(ready, durations) == pytest.approx(max(tails))
    assert least_exposed(ready, durations, 0.6) == pytest.approx(max(tails) - 0.6)
    assert least_exposed(ready, durations, 10.0) == 0.0
    # One bucket for all waits for the last gradient; no buckets can beat single gradients.
    alone = bucketed(ready, durations, [[0], [1], [2]])
    whole = bucketed(ready, durations, [[0, 1, 2]])
    assert finish(*alone) == pytest.approx(0.7) and finish(*whole) == pytest.approx(0.5 + 0.6)


def measured(*seconds):
    return Measured(list(seconds), [0.0] * len(seconds))


def test_ratios_are_taken_round_by_round():
    rounds = {
        "no_sync": measured(1.0, 2.0, 4.0),
        "ddp": measured(2.0, 4.0, 8.0),
        "fastsync": measured(1.5, 3.0, 6.0),
    }
    by_name = {t.variant: t for t in summarise(rounds, {})}
    assert by_name["fastsync"].ratio == Spread(0.75, 0.75, 0.75)
    assert by_name["fastsync"].exposed_ratio == Spread(0.5, 0.5, 0.5)
    assert by_name["ddp"].exposed == Spread(2.0, 1.5, 3.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_that_does_too_little_is_found_out(case):
    task = case.task(WORKLOADS["small"](scale=0.01), torch.device("cpu"))
    for name, way in task.ways.items():
        task.check(name, way)
    with pytest.raises(CheckFailed):
        task.check("nothing", lambda: None)

    def wrong():
        task.ways["fastsync"]()
        task.targets[-1].view(-1)[-1] += 1

    with pytest.raises(CheckFailed, match="by fastsync"):
        task.check("fastsync", wrong)


@pytest.mark.parametrize("case", CODEC_CASES, ids=lambda case: case.name)
def test_a_codec_that_does_too_little_is_found_out(case):
    task = case.task(WORKLOADS["small"](scale=0.01), torch.device("cpu"))
    assert set(task.ways) == {"fastsync", "torch"}
    for name, way in task.ways.items():
        task.check(name, way)
    for name in task.ways:
        with pytest.raises(CheckFailed):
            task.check(name, lambda: None)


def test_wire_formats_are_those_of_the_package():
    ours = {v.wire: v for v in variants.VARIANTS.values() if v.wire and not v.by_name}
    assert {*FORMATS, "topk", "powersgd"} <= set(ours)
    for wire, variant in ours.items():
        assert variant.name == ("fastsync" if wire == "fp32" else f"fastsync_{wire}")
        assert variant.lossy == (wire != "fp32")


def test_charts_are_wellformed_and_hold_what_they_are_given():
    labels = Labels("a < b", "x", "y")
    lines = [Line("one", [(1, 2.0), (1024, 3.0)]), Line("other", [(1, 2.5)], dashed=True)]
    for log_y in (False, True):
        chart = ElementTree.fromstring(line_chart(labels, lines, log_y))
        words = [element.text for element in chart.iter() if element.text]
        assert {"a < b", "x", "y", "one", "other"} <= set(words)


@pytest.mark.parametrize("largest", [0.003, 1, 7, 1234])
def test_marks_are_round_and_reach_the_largest(largest):
    marks = nice_marks(largest)
    assert marks[0] == 0 and marks[-1] >= largest * (1 - 1e-9) and 3 <= len(marks) <= 8


def _touch_shared(pipe, memory):
    memory[:] = b"\1" * len(memory)
    pipe.send(os.getpid())
    pipe.recv()


def test_memory_that_ranks_share_is_charged_once():
    """As the kernel charges it to all of them together; what each has for itself counts in each."""
    size = 64 << 20
    context = multiprocessing.get_context("fork")
    memory = mmap.mmap(-1, size)
    here, there = context.Pipe()
    other = context.Process(target=_touch_shared, args=(there, memory))
    other.start()
    try:
        pids = [os.getpid(), here.recv()]
        before = charged(pids)
        assert memory[:: mmap.PAGESIZE] == b"\1" * (size // mmap.PAGESIZE)  # mapped in both
        shared = charged(pids) - before
        own = b"\1" * size
        added = charged(pids) - before - shared
    finally:
        here.send(None)
        other.join()
    assert abs(shared) < size // 8 and abs(added - len(own)) < size // 8
