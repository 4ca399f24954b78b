"""Timelines of real ranks: recorded, written, joined, shown."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fastsync import DiLoCo, FastDDP, LocalSGD, RankMismatchError, TimelinePolicy
from fastsync.timeline.command import main
from fastsync.timeline.data import by_step, find_slow_ranks, load
from fastsync.timeline.page import html_page
from fastsync.timeline.views import perfetto_trace, summarise, summary_text
from tests.helpers.teams import run_ranks
from tests.timeline.recordings import made_up_run

ROOT = Path(__file__).parents[2]


class Sleeper(nn.Module):
    """Three layers, of which the first sleeps in its forward."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layers(x)


def train(model, steps):
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(4, 32)).sum().backward()


def record(rank, world, wanted, steps, slow=-1):
    model = FastDDP(Sleeper(0.05 if rank == slow else 0.0), bucket_cap_mb=0.001, timeline=wanted)
    train(model, steps)
    return [step.step for step in model._recorder.steps()]


def test_a_window_is_recorded_and_written_with_its_buckets(tmp_path):
    path = tmp_path / "run.json"
    policy = TimelinePolicy(str(path), skip=2, steps=3)
    assert run_ranks(record, 2, policy, 8) == [[2, 3, 4]] * 2
    run = load(path)
    assert (run.model, run.world_size, run.backend, run.missing) == ("Sleeper", 2, "gloo", ())
    assert list(by_step(run)) == [2, 3, 4]
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert all(rank.clock_error_ns == rank.dropped == 0 for rank in run.ranks)
    named = [name for info in run.plans[-1] for name in info.parameters]
    expected = [f"layers.{i}.{kind}" for i in range(3) for kind in ("bias", "weight")]
    assert sorted(named) == expected
    for step in (step for ranks in by_step(run).values() for step in ranks):
        infos = run.plans[step.plan - 1]
        assert [b.bytes for b in step.buckets] == [info.bytes for info in infos]
        for b in step.buckets:
            assert step.backward_start <= b.ready <= b.packed <= b.launched <= b.done <= step.end


def test_a_rank_that_sleeps_is_the_straggler(tmp_path):
    policy = TimelinePolicy(str(tmp_path / "run.json"), skip=1, steps=4)
    run_ranks(record, 2, policy, 6, 1)
    run = load(tmp_path / "run.json")
    slow = find_slow_ranks(by_step(run))
    assert (slow.ranks, slow.slow) == ((1,), "forward")
    assert "straggler      rank 1, for " in summary_text(run)


def write_twice(rank, world, folder):
    model = FastDDP(Sleeper(), bucket_cap_mb=0.001, timeline=True)
    train(model, 5)
    model.write_timeline(f"{folder}/early.json")
    train(model, 1)
    model.write_timeline(f"{folder}/late.json")


def test_written_on_demand(tmp_path):
    run_ranks(write_twice, 2, str(tmp_path))
    assert list(by_step(load(tmp_path / "early.json"))) == [3, 4]
    assert list(by_step(load(tmp_path / "late.json"))) == [3, 4, 5]
    page = str(tmp_path / "page.html")
    assert main([str(tmp_path / "late.json"), "--html", page]) == 0
    assert "on 2 ranks" in (tmp_path / "page.html").read_text()


def write_alone(rank, world, path):
    model = FastDDP(Sleeper(), timeline=True)
    train(model, 5)
    if rank == 0:
        model._recorder.write(path, timeout=0.2)


def test_a_rank_that_does_not_come_is_named_as_missing(tmp_path):
    run_ranks(write_alone, 2, str(tmp_path / "run.json"))
    run = load(tmp_path / "run.json")
    assert run.missing == (1,)
    assert "nothing recorded of rank 1" in summary_text(run)


def out_of_inputs(rank, world, path):
    policy = TimelinePolicy(path, skip=1, steps=5)
    model = FastDDP(Sleeper(), bucket_cap_mb=0.001, timeline=policy)
    with model.join():
        train(model, 9 if rank == 0 else 4)


def test_a_rank_that_runs_out_of_inputs_still_hands_over(tmp_path):
    run_ranks(out_of_inputs, 2, str(tmp_path / "run.json"))
    run = load(tmp_path / "run.json")
    assert run.missing == ()
    assert list(by_step(run)) == [1, 2, 3]  # those that both ranks computed


def without_timeline(rank, world):
    model = FastDDP(Sleeper())
    train(model, 2)
    with pytest.raises(RuntimeError, match="timeline=True"):
        model.write_timeline("nowhere.json")
    return model._recorder is None and model._engine.on_step is None


def test_nothing_is_recorded_unless_asked_for():
    assert run_ranks(without_timeline, 2) == [True, True]


def differ(rank, world):
    try:
        FastDDP(Sleeper(), timeline=rank == 0)
    except RankMismatchError as error:
        return "timeline" in str(error)
    return False


def test_all_ranks_record_or_none():
    assert run_ranks(differ, 2) == [True, True]


@pytest.mark.slow(but=("wrong2",))
@pytest.mark.parametrize("wrong", [{"skip": -1}, {"steps": 0}, {"capacity": 0}])
def test_policies_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=f"timeline: {next(iter(wrong))}"):
        TimelinePolicy("x.json", **wrong)


SCRIPT = """
import sys, torch, fastsync
torch.distributed.init_process_group("gloo")
model = fastsync.FastDDP(torch.nn.Linear(4, 4), timeline=sys.argv[1])
for _ in range(6):
    model(torch.ones(1, 4)).sum().backward()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_short_training_writes_when_it_exits(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path / "run.json")],
        cwd=ROOT,
        env={**subprocess.os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m fastsync.timeline" in done.stderr
    run = load(tmp_path / "run.json")
    assert (list(by_step(run)), run.missing) == ([3, 4, 5], ())


def test_the_command_line(tmp_path, capsys):
    made_up_run(late=8).dump(tmp_path / "run.json")
    trace = tmp_path / "trace.json"
    assert main([str(tmp_path / "run.json"), "--perfetto", str(trace)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"exposed +18\.00 ms", told)
    assert "rank 1, for 8.0 ms (8%) of each step: it takes 8.0 ms longer in backward" in told
    assert (tmp_path / "run.html").exists()
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_command_line_refuses_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    assert main([str(tmp_path / "x.json")]) == 2
    assert "not a timeline" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2
    made_up_run(steps=0).dump(tmp_path / "empty.json")
    assert main([str(tmp_path / "empty.json")]) == 2
    assert "no step that is complete" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fastsync.timeline", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--perfetto" in done.stdout


def test_the_trace_has_a_process_per_rank_and_a_thread_per_lane():
    events = perfetto_trace(made_up_run(late=8))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    lanes = {(e["pid"], e["tid"]) for e in slices}
    assert lanes == {(rank, lane) for rank in (0, 1) for lane in (0, 1, 2)}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {
        (r, t): n for r in (0, 1) for t, n in enumerate(("compute", "bucket 0", "bucket 1"))
    }
    reduces = [e for e in slices if e["name"] == "all-reduce" and e["pid"] == 0]
    assert [e["dur"] for e in reduces[:2]] == [22_000, 21_000]  # microseconds
    assert reduces[0]["args"]["parameters"] == ["layer.weight", "layer.bias"]
    exposed = [e["dur"] for e in slices if e["name"] == "exposed" and e["pid"] == 0]
    assert exposed == [18_000] * 4


def test_the_summary_takes_the_rank_with_most_exposed_time():
    summary = summarise(made_up_run(late=8))
    assert summary.exposed == pytest.approx(0.018)
    assert summary.medians.exposed == pytest.approx(0.014)
    assert summary.bytes == 2 << 20


def bars(page, rank):
    """Kind, begin and width in percent of every bar of a rank, by lane."""
    part = page.split(f"<h3>Rank {rank}</h3>")[1].split("<h3>")[0].split("<h2>")[0]
    found = {}
    for lane in re.findall(r'class="lane"><span>(.*?)</span>(.*?)</div></div>', part, re.DOTALL):
        shapes = re.findall(r'<i class="([\w-]+)" style="left:([\d.]+)%;width:([\d.]+)%"', lane[1])
        found[lane[0]] = [(kind, float(left), float(width)) for kind, left, width in shapes]
    return found


def test_lanes_of_the_page_are_drawn_to_scale():
    page = html_page(made_up_run(late=8))
    lanes = bars(page, 0)
    assert list(lanes) == ["compute", "bucket 0", "bucket 1", "communication"]
    whole = 68  # milliseconds
    forward, backward, exposed = lanes["compute"]
    assert forward == ("forward", 0.0, pytest.approx(100 * 10 / whole, abs=0.01))
    assert backward[1:] == pytest.approx((100 * 10 / whole, 100 * 40 / whole), abs=0.01)
    assert exposed == ("exposed", *(pytest.approx(100 * x / whole, abs=0.01) for x in (50, 18)))
    # Rank 1 launches it at 29 ms; both are through at 43.
    late, wire = lanes["bucket 0"][1:]
    assert (late[0], wire[0]) == ("late", "all-reduce")
    assert late[1] + late[2] == pytest.approx(wire[1], abs=0.01)
    assert wire[1:] == pytest.approx((100 * 29 / whole, 100 * 14 / whole), abs=0.01)
    assert bars(page, 1)["bucket 0"][1][2] == 0, "the last rank waits for no other"


def test_the_page_says_what_the_summary_says():
    page = html_page(made_up_run(late=8))
    assert "rank 1, for 8.0 ms (8%) of each step: it takes 8.0 ms longer in backward" in page
    assert "layer.weight" in page and "1.0 MiB as float32" in page


def test_the_page_refers_to_nothing_outside_itself():
    page = html_page(made_up_run())
    assert not re.search(r"<link|<script|src=|href=|@import|url\(|https?://", page)


def test_names_of_parameters_are_text():
    page = html_page(made_up_run(names=("<b>w", "x")))
    assert "<b>" not in page and "&lt;b&gt;w" in page


def test_many_ranks_show_the_straggler():
    run = made_up_run(late=8)
    others = [replace(run.ranks[0], rank=rank) for rank in range(11)]
    ranks = (*others, replace(run.ranks[1], rank=11))
    page = html_page(replace(run, world_size=12, ranks=ranks))
    assert page.count("<h3>") == 8 and "<h3>Rank 11</h3>" in page


def record_rounds(rank, world, path, mode):
    model = FastDDP(Sleeper(), sync=mode, timeline=TimelinePolicy(path, skip=2, steps=8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(11):
        optimizer.zero_grad()
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
    stats = model.sync_stats()
    return stats.recorded_steps, stats.compute_time, stats.rounds


NUMEL = 3 * (32 * 32 + 32)
# Number of ranks; by the step of an average's arrival, the bytes that leave rank 0 for it.
AVERAGES = {
    "at once": (LocalSGD(4), 2, {3: 4 * NUMEL, 7: 4 * NUMEL}),
    "streaming": (
        DiLoCo(4, fragments=2, overlap=1),
        2,
        {4: 4 * 1088, 6: 4 * 2080, 8: 4 * 1088},  # that of step 2 was sent before the window
    ),
    "parts": (DiLoCo(4, within=2), 4, {3: 4 * NUMEL, 7: 4 * NUMEL}),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_rounds_are_recorded(name, tmp_path):
    mode, world, wanted = AVERAGES[name]
    path = tmp_path / "run.json"
    for recorded, computing, averages in run_ranks(record_rounds, world, str(path), mode):
        assert recorded == 8 and computing > 0 and averages >= len(wanted)
    run = load(path)
    steps = by_step(run)
    assert list(steps) == list(range(2, 10))
    for number, ranks in steps.items():
        assert sum(m.bytes for m in ranks[0].moves) == wanted.get(number, 0)
        for step in ranks:
            assert bool(step.moves) == (number in wanted)
            assert step.forwards and step.forwards[0][0] < step.backward_start
            for move in step.moves:
                before = step.start if name == "streaming" else move.started
                assert move.started <= before <= move.wanted <= move.arrived
                assert run.units[move.unit].parameters
                assert step.backward_end < move.wanted
            assert bool(step.buckets) == (name == "parts")
    assert "average" in summary_text(run)
    assert html_page(run).count('class="average"')
    trace = perfetto_trace(run)["traceEvents"]
    assert sum(e["name"] == "average" for e in trace) == world * len(wanted)
