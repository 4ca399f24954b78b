"""Profiles: whose they are, what they may be used for, and what comes of them."""

import json
import re

import pytest

from fastsync.planner.command import main
from fastsync.planner.devices import kind_of_gpu
from fastsync.planner.links import Cluster, Link, collective_seconds
from fastsync.planner.profile import DeviceRates, LinkRates, Machine, Profile, Sample

RATES = DeviceRates(1e11, 1e10, 1e-6, 0.25)
CPU = Machine("Abacus 9", 12)
H100 = Machine("Abacus 9", 12, "NVIDIA H100 80GB HBM3", 85e9)
UNKNOWN = Machine("Abacus 9", 12, "Slide Rule 300", 48e9)
TRAINED = ("--params", "1e8", "--batch", "1x64", "--gpus", 2)


def over_nccl(nbytes, ranks=8, latency=5e-6, rate=200e9):
    link = Link(rate, latency, "net")
    return collective_seconds("all_reduce", nbytes, Cluster(ranks, ranks, link, link))


def links(backend, ranks=8):
    sizes = [1 << power for power in range(12, 29, 4)]
    hop = 1e-5
    seconds = [
        over_nccl(n, ranks) if backend == "nccl" else 2 * (ranks - 1) * hop + n / 1e9 for n in sizes
    ]
    return LinkRates.of([Sample(n, s) for n, s in zip(sizes, seconds, strict=True)], ranks)


@pytest.fixture
def write(tmp_path):
    def written(machine, backend):
        path = tmp_path / "profile.json"
        Profile(machine, "2.0", 8, backend, RATES, links(backend)).dump(path)
        return path

    return written


def plan(*arguments):
    return main([str(argument) for argument in arguments])


def planned(capsys, path, *options):
    data = path.with_name("plan.json")
    code = plan(*TRAINED, "--profile", path, "--json", data, *options)
    out = capsys.readouterr()
    return code, out.err or out.out, json.loads(data.read_text()) if code == 0 else None


def test_profiles_are_read_again(tmp_path):
    between = LinkRates(2, 1e-5, 1e9, (Sample(4, 1e-4),), 0.5)
    profile = Profile(H100, "2", 2, "nccl", RATES, None, between)
    profile.dump(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert between.link("gloo").scatter == 0.5


def test_a_plan_says_whose_profile_it_is(write, capsys):
    code, text, found = planned(capsys, write(CPU, "gloo"))
    assert code == 0
    assert "profile: Abacus 9, 12 cores, torch 2.0, 8 ranks over gloo" in text
    assert found["sources"] and found["device"]["name"] == "cpu"
    code, text, found = planned(capsys, write(H100, "nccl"))
    assert "NVIDIA H100 80GB HBM3 of 85 GB, Abacus 9" in text
    assert "2 ranks over nccl" in text


def test_the_device_is_the_one_that_measured(write, capsys):
    _, _, found = planned(capsys, write(H100, "nccl"))
    assert (found["device"]["name"], found["device"]["memory"]) == ("h100", 85e9)
    assert found["cluster"]["backend"] == "nccl"
    _, _, found = planned(capsys, write(H100, "nccl"), "--memory", "40GB", "--device", "H100")
    assert found["device"]["memory"] == 40e9
    _, _, found = planned(capsys, write(UNKNOWN, "nccl"))
    assert (found["device"]["name"], found["device"]["memory"]) == ("Slide Rule 300", 48e9)
    _, _, found = planned(capsys, write(H100, "gloo"))
    assert (found["device"]["name"], found["cluster"]["backend"]) == ("h100", "gloo")


@pytest.mark.parametrize(
    ("machine", "backend", "options", "named"),
    [
        (CPU, "gloo", ("--device", "h100"), "--device h100"),
        (H100, "nccl", ("--device", "cpu"), "--device cpu"),
        (H100, "nccl", ("--device", "a100"), "--device a100"),
        (UNKNOWN, "nccl", ("--device", "h100"), "--device h100"),
        (CPU, "gloo", ("--backend", "nccl"), "--backend nccl"),
        (H100, "nccl", ("--backend", "gloo"), "--backend gloo"),
    ],
)
def test_another_machines_profile_is_refused(machine, backend, options, named, write, capsys):
    code, text, _ = planned(capsys, write(machine, backend), *options)
    assert code == 2
    assert "--profile" in text and "--device" in text and named in text
    assert str(machine) in text


def test_a_profile_does_not_fit_a_run_of_another_kind(write, tmp_path, capsys):
    from tests.test_planner_time import recorded_run

    recorded_run().dump(tmp_path / "run.json")
    options = ("--from", tmp_path / "run.json", "--gpus", 2, "--profile")
    assert plan(*options, write(H100, "nccl")) == 2
    told = capsys.readouterr().err
    assert "--profile" in told and "--from" in told
    assert plan(*options, write(CPU, "gloo")) == 0
    assert "profile: Abacus 9" in capsys.readouterr().out


def test_profiles_of_other_formats_are_refused(write, capsys):
    path = write(CPU, "gloo")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "version": 5, "machine": "x86_64"}))
    code, text, _ = planned(capsys, path)
    assert code == 2
    assert re.search(r"--profile: .*format 5.*--measure", text)
    path.write_text("{}")
    code, text, _ = planned(capsys, path)
    assert code == 2
    assert re.search(r"--profile: .*is no profile", text)


def test_what_was_measured_over_nccl_is_planned_over_nccl():
    found = links("nccl").link("nccl")
    at = Cluster(8, 8, found, found, "nccl")
    for nbytes in (1 << 12, 1 << 20, 1 << 28):
        planned = collective_seconds("all_reduce", nbytes, at)
        assert planned == pytest.approx(over_nccl(nbytes), rel=0.1)


def test_measured_shares_of_other_collectives_are_planned_with(tmp_path, capsys):
    rates = LinkRates(2, 1e-5, 1e9, (Sample(4, 1e-4),), 0.5)
    path = tmp_path / "profile.json"
    Profile(CPU, "2.0", 2, "gloo", RATES, rates).dump(path)
    _, _, found = planned(capsys, path)
    assert found["cluster"]["intra"]["scatter"] == 0.5
    _, _, found = planned(capsys, path, "--intra", "5GB/s", "--latency", "3us")
    assert found["cluster"]["intra"]["rate"] == 5e9
    assert found["cluster"]["intra"]["latency"] == pytest.approx(3e-6)


@pytest.mark.parametrize(
    ("name", "memory", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA H100 NVL", 100e9, "h100"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100"),
        ("Tesla V100-SXM2-32GB", 34e9, "v100"),
        ("NVIDIA H200", 150e9, "h200"),
        ("NVIDIA GH200 480GB", 100e9, None),
        ("NVIDIA GeForce RTX 4090", 25e9, None),
    ],
)
def test_gpus_are_known_by_the_names_of_their_drivers(name, memory, kind):
    assert kind_of_gpu(name, memory) == kind
