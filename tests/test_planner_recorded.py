"""Plans from a recorded run: its links, and what cannot be followed."""

import json
import re
from dataclasses import replace

import pytest
import torch

from fastsync.ddp import FastDDP
from fastsync.planner.command import main
from fastsync.planner.compute import from_run
from fastsync.planner.links import Cluster, Link, collective_seconds
from fastsync.planner.recorded import link_of_run
from fastsync.testing import run_ranks
from fastsync.timeline.data import BucketInfo, RankRecord, Run, load
from fastsync.timeline.moves import UnitInfo

CPU = Cluster(4, 4, Link(1e9, 50e-6, "net"), Link(1e9, 50e-6, "net"), "gloo")


def run_over(link, sizes, backend="gloo", world=4):
    """Steps whose buckets take what `link` says; all but the first wait for their predecessor."""
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
                (step, "backward_end", 0, 0, base + 9000),
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


def test_recorded_units_are_named(tmp_path, capsys):
    run = run_over(Link(2e9, 80e-6, "net"), (1 << 16, 1 << 24))
    path = tmp_path / "run.json"
    replace(run, units=(UnitInfo("0", ("w",), 4, "float32"),)).dump(path)
    assert plan("--from", path, "--gpus", 8) == 2
    told = capsys.readouterr().err
    assert f"--from: {path} holds units of zero=3" in told and "--model" in told


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


def train(rank, world, path):
    import runpy

    model = runpy.run_path(str(path.with_name("recorded_model.py")))["build_model"]()
    model = FastDDP(model, timeline=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    model.write_timeline(path)


def test_a_recorded_model_is_planned_with_its_own_times(tmp_path, capsys):
    path, file, data = tmp_path / "run.json", tmp_path / "recorded_model.py", tmp_path / "plan.json"
    file.write_text(MODEL)
    run_ranks(train, 2, path, timeout=120.0)
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
