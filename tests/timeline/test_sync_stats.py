"""sync_stats(): counters, times, and how they print."""

import pytest
import torch
from torch import nn

from fastsync import FastDDP, SyncStats
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
        "fastsync: 9 synchronised steps",
        "  steps            9",
        "  plans            2",
        "  collectives      18",
        "  bytes            9.0 MiB",
        "  sent_bytes       4.5 KiB",
        "  residual_bytes   256 B",
        "  exposed_seconds  500.00 ms",
        "  buckets          64 B, 32 B",
        "  times            not recorded; timeline=True or record_timeline() records them",
    ]


def test_times_print_as_a_report():
    lines = str(make_stats(COUNTERS, [64, 32], recorded(), 0.08)).splitlines()
    assert [line.split(maxsplit=1) for line in lines[-8:]] == [
        ["recorded_steps", "3"],
        ["step_time", "100.00 ms"],
        ["compute_time", "50.00 ms"],
        ["communication_time", "27.00 ms"],
        ["exposed_time", "10.00 ms"],
        ["overlap", "70%"],
        [
            "bucket_times",
            "bytes 64 B waiting 1.00 ms communicating 14.00 ms, "
            "bytes 32 B waiting 5.00 ms communicating 13.00 ms",
        ],
        ["scaling_efficiency", "80%"],
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
        assert ("exposed_time" in text) == timeline
        assert repr(stats).startswith("SyncStats(steps=6, ")


def log_to_files(rank, world, folder):
    from torch.utils.tensorboard import SummaryWriter

    model = FastDDP(nn.Linear(8, 8), timeline=True)
    for _ in range(5):
        model(torch.ones(1, 8)).sum().backward()
    with SummaryWriter(f"{folder}/{rank}") as writer:
        for name, value in model.sync_stats().items():
            if isinstance(value, int | float):
                writer.add_scalar(f"fastsync/{name}", value, 5)


def test_tensorboard_takes_the_mapping_as_the_docs_show(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(log_to_files, 2, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "1"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("fastsync/steps")] == [(5, 5.0)]
    assert "fastsync/exposed_time" in events.Tags()["scalars"]


def train_for_efficiency(rank, world):
    model = FastDDP(nn.Linear(8, 8), timeline=True)
    for _ in range(6):
        model(torch.ones(1, 8)).sum().backward()
    return dict(model.sync_stats(one_rank_step=1e-9))


def test_two_ranks_that_measure():
    for stats in run_ranks(train_for_efficiency, 2):
        assert all(stats[name] is not None for name in TIMES)
        assert 0 <= stats["overlap"] <= 1
        assert 0 < stats["scaling_efficiency"] < 1
        assert stats["recorded_steps"] == 3
