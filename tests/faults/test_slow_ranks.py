"""Ranks that the others wait for: how a window is judged, and real ranks of which one is slow."""

import logging
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fastsync import FastDDP
from fastsync.config.arguments import grouped
from fastsync.reducer.step_timing import ACTIVITIES, SlowRankWarning, during, step_timing_of
from tests.helpers.teams import run_ranks

MS = 1_000_000
SLEEP = 0.03  # seconds, where a step takes about 5 ms


@dataclass(frozen=True)
class Record:
    rank: int
    times: tuple[int, ...]


def records(*waits, step=100, slow="forward"):
    """Ranks with these waits in ms; what else a step takes is all spent on `slow`, sorted."""
    made = []
    for rank, wait in enumerate(waits):
        busy = [MS * (step - wait) if name == slow else 0 for name in ACTIVITIES]
        made.append(Record(rank, (*busy, MS * wait)))
    return sorted(made, key=lambda record: record.times[-1])


def judged(*waits, ranks=None, **more):
    made = records(*waits, **more)[:9]
    return step_timing_of(50, made, ranks or len(waits))


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_the_rank_that_waits_least_is_named_with_what_it_does(activity):
    step_timing = judged(42, 40, 5, slow=activity)
    assert step_timing.slow.ranks == (2,)
    assert step_timing.slow.slow == activity
    assert step_timing.slow.cost == pytest.approx(0.035) == step_timing.slow.excess[activity]
    assert step_timing.slow.share == pytest.approx(0.35)
    assert (step_timing.step_time, step_timing.network_time) == (
        pytest.approx(0.1),
        pytest.approx(0.005),
    )


@pytest.mark.parametrize("waits", [(0, 0, 0), (60, 60, 60), (60, 61, 63), (0, 4, 4), (0, 0, 40)])
def test_nobody_is_named_where_all_wait_alike_or_most_wait_for_one_another(waits):
    assert judged(*waits).slow is None


def test_ranks_that_are_slow_alike_are_named_together():
    step_timing = judged(50, 1, 52, 0, 51, 55)
    assert step_timing.slow.ranks == (1, 3)
    assert step_timing.slow.cost == pytest.approx(0.049)
    assert "they take 49.5 ms longer in forward" in str(step_timing.slow)


def test_of_many_ranks_the_first_are_enough():
    slow = judged(*[0] * 8, *[30] * 50).slow
    assert slow.ranks == tuple(range(8))
    assert judged(*[0] * 9, *[30] * 50).slow is None, "more than are told of"


def test_one_of_two_ranks():
    assert judged(0, 30).slow.ranks == (0,)


def warned(caplog, timings, share=0.1):
    warning = SlowRankWarning(share)
    with caplog.at_level(logging.WARNING, logger="fastsync"):
        for step_timing in timings:
            warning.look_at(step_timing)
    return [record.getMessage() for record in caplog.records]


def test_warnings_come_more_and_more_rarely(caplog):
    made = records(40, 40, 5)
    texts = warned(caplog, [None, *(step_timing_of(50 * n, made, 3) for n in range(1, 41))])
    windows = [f"steps {50 * n - 49} to {50 * n}" for n in (1, 2, 5, 14)]
    assert len(texts) == 4
    assert all(window in text for window, text in zip(windows, texts, strict=True))
    assert texts[0] == (
        "fastsync: the others wait for rank 2, for 35.0 ms (35%) of each step: it takes 35.0 ms "
        "longer in forward (steps 1 to 50). Look at the sizes of its batches, its cores, and what "
        "else runs on its machine"
    )


def test_no_warning_below_the_share_that_is_asked_for(caplog):
    assert not warned(caplog, [judged(40, 40, 5)], share=0.36)
    assert warned(caplog, [judged(40, 40, 5)], share=0.34)


def test_no_warning_of_less_than_some_milliseconds(caplog):
    """They may be any share of a short step; the timing itself shows them."""
    short = judged(4, 4, 0, step=10)
    assert short.slow.ranks == (2,) and short.slow.share == pytest.approx(0.4)
    assert not warned(caplog, [short])
    assert warned(caplog, [judged(6, 6, 0, step=15)])


class Net(nn.Module):
    """Can sleep in its forward, and in its backward."""

    def __init__(self, norm):
        super().__init__()
        self.front = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.back = nn.Linear(16, 16)
        self.sleeps = ""

    def forward(self, x):
        hidden = self.norm(self.front(x))
        if self.sleeps == "forward":
            time.sleep(SLEEP)
        if self.sleeps == "backward":
            hidden.register_hook(lambda _: time.sleep(SLEEP))
        return self.back(hidden)


def train(rank, world, slow, where, options):
    """Train a window; return what this rank says of it, and what it logs then."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("fastsync").addHandler(handler)
    torch.set_num_threads(1)
    options = dict(options)
    model = FastDDP(Net(options.pop("norm", False)), **grouped(options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.module.sleeps = where if rank in slow else ""

    def step():
        model(torch.randn(8, 16)).sum().backward()
        if rank in slow and where == "between steps":
            time.sleep(SLEEP)
        optimizer.step()

    for _ in range(51):
        step()
    deadline = time.monotonic() + 20
    while model.sync_stats().network_time is None and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = model.sync_stats()
    step()
    return stats, [text for text in texts if "wait for" in text]


CASES = [
    (2, "forward", {}),
    (0, "between steps", {}),
    (1, "backward", {}),
    (0, "between steps", {"norm": True}),
    (1, "between steps", {"zero": 1}),
    (2, "backward", {"zero": 2}),
    (0, "forward", {"wire": "int8"}),
    (1, "forward", {"shared_memory": False}),
]


def name_of(case):
    slow, where, options = case
    asked = [f"{name}={value}" for name, value in options.items()]
    return "-".join([str(slow), where.replace(" ", "_"), *asked])


@pytest.mark.slow(but=("2-forward",))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_rank_names_the_one_that_is_slow(case):
    slow, where, options = case
    results = run_ranks(train, 3, (slow,), where, options)
    for stats, _ in results:
        assert stats.straggler.ranks == (slow,), str(stats)
        assert stats.straggler.slow == where, str(stats)
        assert stats.straggler == results[0][0].straggler
        assert f"rank {slow}, for " in str(stats)
    texts = results[0][1]
    assert len(texts) == 1
    assert f"the others wait for rank {slow}" in texts[0]
    assert f"longer {during(where)}" in texts[0]
    assert all(not texts for _, texts in results[1:])


@pytest.mark.slow("forward")
@pytest.mark.parametrize("where", ["forward", "between steps"])
def test_nobody_is_named_where_all_sleep_alike(where):
    for stats, texts in run_ranks(train, 3, (0, 1, 2), where, {}):
        assert stats.straggler is None, str(stats)
        assert stats.network_time is not None
        assert "waits for" in str(stats)
        assert not texts


def train_alone(rank, world):
    model = FastDDP(Net(norm=False))
    for _ in range(51):
        model(torch.randn(8, 16)).sum().backward()
    return model.sync_stats()


def test_a_rank_alone_waits_for_nobody():
    [stats] = run_ranks(train_alone, 1)
    assert stats.straggler is None
    assert stats.network_time is None
