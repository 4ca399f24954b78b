"""sync_stats(): counters, times, and their way into TensorBoard."""

import pytest
import torch
from torch import nn

from fastsync import FastDDP, SyncStats, log_to_tensorboard
from fastsync.timeline.data import steps_of
from fastsync.timeline.stats import BucketTiming, make_stats
from tests.helpers.teams import run_ranks
from tests.timeline.recordings import step_events

COUNTERS = {
    "steps": 9,
    "plans": 2,
    "collectives": 18,
    "bytes": 90,
    "sent_bytes": 90,
    "between_nodes_bytes": 30,
    "residual_bytes": 256,
    "exposed_seconds": 0.5,
}
TIMES = ("step_time", "compute_time", "communication_time", "exposed_time", "overlap")


def recorded(count=3, gap=100, plan=1):
    events = []
    for number in range(count):
        buckets = [(20, 21, 21, 35), (40, 45, 45, 58)]
        events += step_events(number, gap * number, buckets, plan=plan)
    return list(steps_of(0, events).values())


def test_counters_alone_without_a_recording():
    stats = make_stats(COUNTERS, [64, 32], [], None)
    assert (stats.steps, stats.bytes, stats.buckets) == (9, 90, (64, 32))
    assert all(getattr(stats, name) is None for name in (*TIMES, "bucket_times"))
    assert stats.recorded_steps == 0


def test_times_are_medians_of_the_recorded_steps():
    stats = make_stats(COUNTERS, [64, 32], recorded(), 0.08)
    assert stats.recorded_steps == 3
    assert stats.step_time == pytest.approx(0.1)
    assert stats.compute_time == pytest.approx(0.05)
    assert stats.communication_time == pytest.approx(0.027)
    assert stats.exposed_time == pytest.approx(0.01)
    assert stats.communication_ratio == pytest.approx(0.027 / 0.05)
    assert stats.overlap == pytest.approx(19 / 27)
    assert stats.scaling_efficiency == pytest.approx(0.8)
    assert stats.bucket_times == (
        BucketTiming(64, pytest.approx(0.001), pytest.approx(0.014)),
        BucketTiming(32, pytest.approx(0.005), pytest.approx(0.013)),
    )


def test_a_gap_in_the_recording_is_no_step():
    steps = recorded(4)
    assert make_stats(COUNTERS, [], [steps[0], steps[2]], None).step_time is None
    assert make_stats(COUNTERS, [], [*steps[:2], steps[3]], None).step_time == pytest.approx(0.1)


def test_buckets_of_an_earlier_plan_do_not_count():
    late = steps_of(0, step_events(9, 900, [(20, 29, 29, 35)], plan=2))[9]
    timings = make_stats(COUNTERS, [64], [*recorded(), late], None).bucket_times
    assert timings == (BucketTiming(64, pytest.approx(0.009), pytest.approx(0.006)),)


@pytest.mark.slow("0", "-1")
@pytest.mark.parametrize("wrong", [0, -1, float("nan")])
def test_a_step_of_one_rank_takes_time(wrong):
    with pytest.raises(ValueError, match="one_rank_step"):
        make_stats(COUNTERS, [], recorded(), wrong)


def test_efficiency_needs_something_to_compare():
    with pytest.raises(ValueError, match="timeline=True"):
        make_stats(COUNTERS, [], [], 0.1)


def test_stats_are_a_mapping_and_frozen():
    stats = make_stats(COUNTERS, [], [], None)
    assert stats["bytes"] == dict(stats)["bytes"] == stats.bytes
    assert set(stats) == set(SyncStats.__dataclass_fields__)
    with pytest.raises(KeyError):
        stats["__class__"]
    with pytest.raises(AttributeError):
        stats.bytes = 1


def test_counters_print_as_a_report():
    counters = {**COUNTERS, "bytes": 9 << 20, "sent_bytes": 9 << 9, "between_nodes_bytes": 0}
    assert str(make_stats(counters, [64, 32], [], None)).splitlines() == [
        "fastsync: 9 synchronised steps, 2 plans, 2 buckets of 96 B in all",
        "  collectives per step   2.0",
        "  handed to the backend  1.0 MiB per step",
        "  sent by this rank      512 B per step",
        "  error feedback         256 B of memory",
        "  waited after backward  55.56 ms per step",
        "  times                  not recorded; FastDDP(..., timeline=True) records them",
    ]


def test_times_print_as_a_report():
    lines = str(make_stats(COUNTERS, [64, 32], recorded(), 0.08)).splitlines()
    assert lines[-8:] == [
        "  times                  medians of 3 recorded steps",
        "    step                 100.00 ms",
        "    forward, backward    50.00 ms",
        "    communication        27.00 ms, 70% of it within backward",
        "    exposed              10.00 ms that synchronising adds to a step",
        "    scaling efficiency   80% of a single rank's speed",
        "    bucket 0             64 B: waited 1.00 ms, communicated 14.00 ms",
        "    bucket 1             32 B: waited 5.00 ms, communicated 13.00 ms",
    ]


def train_and_print(rank, world, timeline):
    model = FastDDP(nn.Linear(8, 8), timeline=timeline)
    before = str(model.sync_stats())
    for _ in range(6):
        model(torch.ones(1, 8)).sum().backward()
    return before, model.sync_stats()


@pytest.mark.slow("False")
@pytest.mark.parametrize("timeline", [False, True])
def test_two_ranks_that_print(timeline):
    for before, stats in run_ranks(train_and_print, 2, timeline):
        assert "0 synchronised steps" in before
        text = str(stats)
        assert "6 synchronised steps" in text
        assert "None" not in text
        assert ("timeline=True" in text) == (not timeline)
        assert ("exposed" in text) == timeline
        assert repr(stats).startswith("SyncStats(steps=6, ")


class Recorded:
    """Stand-in for a SummaryWriter with the one method that is used."""

    def __init__(self):
        self.points = {}

    def add_scalar(self, tag, value, step):
        self.points.setdefault(tag, []).append((step, value))


def train_and_log(rank, world):
    model = FastDDP(nn.Linear(8, 8), timeline=True)
    writer = Recorded()
    log_to_tensorboard(model, writer)
    for _ in range(6):
        model(torch.ones(1, 8)).sum().backward()
    log_to_tensorboard(model, writer, 40, prefix="sync")
    return writer.points, dict(model.sync_stats(one_rank_step=1e-9))


def test_two_ranks_that_log():
    for points, stats in run_ranks(train_and_log, 2):
        assert points["fastsync/steps"] == [(0, 0)]
        assert "fastsync/step_time" not in points  # nothing recorded yet
        assert points["sync/steps"] == [(40, 6)]
        assert points["sync/bucket_0/communicating"][0][1] > 0
        for name in TIMES:
            assert points[f"sync/{name}"] == [(40, stats[name])]
        assert 0 <= stats["overlap"] <= 1
        assert 0 < stats["scaling_efficiency"] < 1
        assert stats["recorded_steps"] == 3


def log_to_files(rank, world, folder):
    from torch.utils.tensorboard import SummaryWriter

    model = FastDDP(nn.Linear(8, 8), timeline=True)
    with SummaryWriter(f"{folder}/{rank}") as writer:
        for _ in range(5):
            model(torch.ones(1, 8)).sum().backward()
        log_to_tensorboard(model, writer)


def test_tensorboard_reads_what_is_logged(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(log_to_files, 2, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "1"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("fastsync/steps")] == [(5, 5.0)]
    assert "fastsync/exposed_time" in events.Tags()["scalars"]
