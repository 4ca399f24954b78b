"""Plans from a recorded run: its links, and what cannot be followed."""

import json
import re
from dataclasses import replace

import pytest
import torch

from fastsync.ddp import FastDDP
from fastsync.plan.arguments import grouped
from fastsync.planner.command import main
from fastsync.planner.devices import device_named
from fastsync.planner.links import Cluster, Link, collective_seconds
from fastsync.planner.plan import plan_of_run
from fastsync.planner.recorded import link_of_run
from fastsync.planner.runs import from_run
from fastsync.testing import run_ranks
from fastsync.timeline.data import BucketInfo, RankRecord, Run, load
from fastsync.timeline.moves import UnitInfo

CPU = Cluster(4, 4, Link(1e9, 50e-6, "net"), Link(1e9, 50e-6, "net"), "gloo")


def run_over(link, sizes, backend="gloo", world=4, takes=lambda rank, step: 1.0):
    """Steps whose buckets take what `link` says; all but the first wait for their predecessor.

    Args:
        takes: what a rank computes for, of 9 us.
    """
    device = "cpu" if backend == "gloo" else "cuda:0"
    at = Cluster(world, world, link, link, backend)
    ranks = []
    for rank in range(world):
        events = []
        for step in range(3):
            begun = base = step * 1_000_000_000
            late = 1000 * rank  # others wait for the last rank
            events += [
                (step, "forward_start", 0, 0, base),
                (step, "forward_end", 0, 0, base + 1000),
                (step, "backward_start", 1, 0, base + 1000),
                (step, "backward_end", 0, 0, base + round(9000 * takes(rank, step))),
            ]
            begun = base + 2000 + 1000 * (world - 1)
            for number, size in enumerate(sizes):
                for mark in ("ready", "packed", "launched"):
                    events.append((step, mark, number, size, base + 2000 + late))
                begun += round(1e9 * collective_seconds("all_reduce", size, at))
                events.append((step, "done", number, 0, begun))
            events.append((step, "step_end", 0, 0, begun + 1000))
        ranks.append(RankRecord(rank, "here", 0, 0, tuple(events)))
    plan = tuple(BucketInfo((f"w{n}",), size, "float32") for n, size in enumerate(sizes))
    return Run("Net", world, backend, device, torch.__version__, (plan,), tuple(ranks))


def plan(*arguments):
    return main([str(argument) for argument in arguments])


def test_latency_and_rate_are_those_of_the_recorded_buckets():
    was = Link(2e9, 80e-6, "net")
    link, words = link_of_run(run_over(was, (1 << 16, 1 << 20, 1 << 24)), CPU)
    assert (link.rate, link.latency) == pytest.approx((was.rate, was.latency), rel=1e-3)
    assert "80 us a hop, fitted to 3 recorded buckets" in words


def test_buckets_of_one_size_leave_the_latency_to_the_tables():
    was = Link(2e9, 50e-6, "net")
    link, words = link_of_run(run_over(was, (1 << 22, 1 << 22)), CPU)
    assert link.latency == CPU.inter.latency
    assert link.rate == pytest.approx(was.rate, rel=1e-3)
    assert "the usual 50 us" in words and "do not tell" in words
    nccl = Cluster(4, 4, Link(1e9), Link(1e9), "nccl")
    run = run_over(Link(10e9, None, "net"), (1 << 26, 1 << 26), "nccl")
    link, words = link_of_run(run, nccl)
    assert link.latency is None and "NCCL's tables" in words
    assert link.rate == pytest.approx(10e9, rel=0.05)


def test_a_rank_that_is_always_slow_stays_one_among_more_ranks():
    link = Link(2e9, 80e-6, "net")
    alike = from_run(run_over(link, (1 << 20,)))
    slow = from_run(run_over(link, (1 << 20,), takes=lambda rank, step: 1.5 if rank == 2 else 1.0))
    assert (alike.straggler, slow.straggler) == (1.0, pytest.approx(1.5))
    assert slow.jitter == alike.jitter == 0.0, "it is as slow in every step"
    assert slow.compute.backward == alike.compute.backward, "that of the others"
    assert "rank 2 always took 1.50 times as long" in slow.compute.source

    def seconds(recorded):
        made = plan_of_run(recorded, "", device_named("cpu"), CPU, (64,))
        return made.scaling[0].time.mean

    assert seconds(slow) - seconds(alike) >= 0.5 * alike.compute.forward


def test_ranks_that_are_slow_in_turn_are_no_stragglers():
    link = Link(2e9, 80e-6, "net")
    turns = from_run(run_over(link, (1 << 20,), takes=lambda rank, step: 1 + 0.3 * (rank == step)))
    assert turns.straggler == 1.0


def scaled(path, capsys, *options):
    data = path.with_name("plan.json")
    code = plan("--from", path, "--gpus", "8,64,512", "--json", data, *options)
    assert code == 0, capsys.readouterr().err
    return capsys.readouterr().out, json.loads(data.read_text())


def test_a_hop_costs_its_latency_at_every_number_of_ranks(tmp_path, capsys):
    path = tmp_path / "run.json"
    run_over(Link(2e9, 80e-6, "net"), (1 << 16, 1 << 24)).dump(path)
    text, found = scaled(path, capsys)
    assert re.search(r"^links: .* fitted to 2 recorded buckets", text, re.M)
    assert found["cluster"]["inter"]["latency"] == pytest.approx(80e-6, rel=1e-3)
    exposed = {p["gpus"]: p["exposed"] for p in found["scaling"] if p["strategy"] == "zero=0"}
    assert exposed[512] > 2 * (2 * 511 * 80e-6) > exposed[8]


def test_links_that_are_given_replace_recorded_ones(tmp_path, capsys):
    path = tmp_path / "run.json"
    run_over(Link(2e9, 80e-6, "net"), (1 << 16, 1 << 24)).dump(path)
    _, found = scaled(path, capsys, "--inter", "5GB/s")
    assert found["cluster"]["inter"]["rate"] == 5e9
    assert found["cluster"]["intra"]["rate"] == pytest.approx(2e9, rel=1e-3)
    text, found = scaled(path, capsys, "--latency", "7us")
    assert found["cluster"]["inter"]["latency"] == pytest.approx(7e-6)
    assert "but for --latency" in text


MS = 1_000_000  # nanoseconds
# What a rank computes between the places where it asks for parameters, and hands over gradients:
# of the root, of "a" and of "b".
FORWARD, BACKWARD, SIZES = (2, 6, 4), (3, 12, 8), (1 << 16, 1 << 20, 1 << 22)


def move(step, unit, kind, started, done, wanted, arrived, sent):
    times = {"started": started, "done": done, "wanted": wanted, "arrived": arrived}
    size = {"started": sent}
    return [(step, f"{kind}_{what}", unit, size.get(what, 0), t) for what, t in times.items()]


def units_over(link, world=4, kind="reduction"):
    """Steps whose units are gathered and reduced over `link`, each while nothing is computed."""
    at = Cluster(world, world, link, link, "gloo")

    def waits(step, unit, what, now):
        name = "all_gather" if what == "gather" else "reduce_scatter"
        through = now + round(1e9 * collective_seconds(name, SIZES[unit], at))
        sent = SIZES[unit] * (world - 1) // world
        return move(step, unit, what, now, through, now, through, sent), through

    events = []
    for step in range(3):
        now = step * 1000 * MS
        events.append((step, "forward_start", 0, 0, now))
        for unit in (0, 1, 2):
            marks, now = waits(step, unit, "gather", now)
            events += marks
            now += FORWARD[unit] * MS
        events += [(step, "forward_end", 0, 0, now), (step, "backward_start", 0, 0, now)]
        for unit in (2, 1, 0):
            if unit:
                marks, now = waits(step, unit, "gather", now)
                events += marks
            now += BACKWARD[unit] * MS
            marks, now = waits(step, unit, kind, now)
            events += marks
        events += [(step, "backward_end", 0, 0, now), (step, "step_end", 0, 0, now)]
    ranks = tuple(RankRecord(rank, "here", 0, 0, tuple(events)) for rank in range(world))
    pairs = zip(("root", "a", "b"), SIZES, strict=True)
    units = tuple(UnitInfo(name, (f"{name}.weight",), size, "float32") for name, size in pairs)
    return Run("Net", world, "gloo", "cpu", torch.__version__, (), ranks, units=units)


def test_units_of_a_recording_compute_and_send_what_they_did():
    was = Link(2e9, 80e-6, "net")
    run = units_over(was)
    recorded = from_run(run)
    assert recorded.compute.forward == pytest.approx(sum(FORWARD) * 1e-3)
    assert recorded.compute.backward == pytest.approx(sum(BACKWARD) * 1e-3)
    assert recorded.messages == ()
    assert [unit.forward for unit in recorded.units] == pytest.approx([4e-3, 6e-3, 2e-3])
    assert [unit.backward for unit in recorded.units] == pytest.approx([8e-3, 12e-3, 3e-3])
    assert [unit.nbytes for unit in recorded.units] == [*reversed(SIZES)]
    assert [unit.travelling for unit in recorded.units] == [*reversed(SIZES)]
    assert [unit.stays for unit in recorded.units] == [False, False, True]
    link, words = link_of_run(run, CPU)
    assert (link.rate, link.latency) == pytest.approx((was.rate, was.latency), rel=1e-3)
    assert "fitted to 8 recorded collectives of units" in words


def test_units_through_shared_memory_have_sent_nothing():
    run = units_over(Link(2e9, 80e-6, "net"))
    ranks = [
        replace(r, events=tuple((*event[:3], 0, event[4]) for event in r.events)) for r in run.ranks
    ]
    recorded = from_run(replace(run, ranks=tuple(ranks)))
    assert [unit.nbytes for unit in recorded.units] == [*reversed(SIZES)]


def test_a_recording_of_units_is_followed(tmp_path, capsys):
    path = tmp_path / "run.json"
    units_over(Link(2e9, 80e-6, "net")).dump(path)
    text, found = scaled(path, capsys)
    assert re.search(r"^links: .* fitted to 8 recorded collectives of units", text, re.M)
    assert {p["strategy"] for p in found["scaling"]} == {"zero=3"}
    exposed = {p["gpus"]: p["exposed"] for p in found["scaling"]}
    assert exposed[512] > 5 * 511 * 80e-6 > exposed[8] > 0


def test_groups_that_have_the_same_shares_are_not_followed(tmp_path, capsys):
    path = tmp_path / "run.json"
    units_over(Link(2e9, 80e-6, "net"), kind="sum").dump(path)
    assert plan("--from", path, "--gpus", 8) == 2
    assert "sums over ranks that have the same shares (HSDP)" in capsys.readouterr().err


MODEL = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).relu()

def build_model():
    return nn.Sequential(*(Block() for _ in range(4)))

def larger():
    return nn.Sequential(build_model(), nn.Linear(64, 64))
"""


def train(rank, world, path, options):
    import runpy

    model = runpy.run_path(str(path.with_name("recorded_model.py")))["build_model"]()
    if options.get("zero") == 3:
        options = {**options, "units": [type(model[0])]}
    model = FastDDP(model, timeline=True, **grouped(options))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    model.write_timeline(path)


@pytest.mark.parametrize("options", [{}, {"zero": 3}], ids=["buckets", "units"])
def test_a_recorded_model_is_planned_with_its_own_times(options, tmp_path, capsys):
    path, file, data = tmp_path / "run.json", tmp_path / "recorded_model.py", tmp_path / "plan.json"
    file.write_text(MODEL)
    run_ranks(train, 2, path, options, timeout=120.0)
    options = ("--from", path, "--batch", "16x64", "--gpus", "2", "--json", data, "--model")
    assert plan(*options, f"{file}:build_model") == 0
    text = capsys.readouterr().out
    assert "recorded: " in text and "Take zero=" in text and "samples/s" in text
    found, recorded = json.loads(data.read_text()), from_run(load(path))
    assert found["compute"]["forward"] == recorded.compute.forward
    assert found["compute"]["backward"] == recorded.compute.backward
    assert found["cluster"]["backend"] == "gloo" and found["device"]["name"] == "cpu"
    times = {each["name"]: each["time"]["computing"] for each in found["candidates"]}
    assert times["zero=0, checkpointing"] > times["zero=0"] > recorded.compute.backward
    assert all(each["peak"] > 0 and each["largest_batch"] for each in found["candidates"])
    assert plan(*options, f"{file}:larger") == 2
    told = capsys.readouterr().err
    assert "--from: " in told and "8 parameters" in told and "has 10" in told
