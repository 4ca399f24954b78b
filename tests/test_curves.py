"""Training in every wire format: the command, and formats that must not pass."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.commands import curves
from examples.common.ranks import CheckFailed, Group
from fastsync import Codec, Wire
from fastsync.testing import run_ranks

ROOT = Path(__file__).parent.parent
STEPS = 60


class Unsigned(Codec):
    """Broken: forgets signs."""

    name = "unsigned"
    form = "gather"

    def coded_bytes(self, numel):
        return 4 * numel

    def encode(self, values, wire):
        wire.view(torch.float32).copy_(values.abs())

    def decode(self, wire, values):
        values.copy_(wire.view(torch.float32))


class Sparse(Codec):
    """The largest 1/64 of a chunk; nothing without what it leaves out being kept."""

    name = "sparse"
    form = "gather"

    def coded_bytes(self, numel):
        return 4 * numel

    def encode(self, values, wire):
        kept = torch.zeros_like(values)
        largest = values.abs().topk(max(1, len(values) // 64)).indices
        kept[largest] = values[largest]
        wire.view(torch.float32).copy_(kept)

    def decode(self, wire, values):
        values.copy_(wire.view(torch.float32))


def trained(rank, world, wires):
    torch.set_num_threads(1)
    group = Group(rank, world, torch.device("cpu"))
    return curves.trainings({"conv": curves.conv_task()}, wires, STEPS, group)


def test_broken_formats_do_not_reach_the_loss_and_a_good_one_does():
    wires = {
        "fp32": "fp32",
        "bf16": "bf16",
        "unsigned": Unsigned(),
        "without residual": Wire(Sparse(), error_feedback=False),
    }
    found = run_ranks(trained, 2, wires, timeout=400)[0]["conv"]
    good = {"conv": {name: found[name] for name in ("fp32", "bf16")}}
    curves.check(good)
    for broken in ("unsigned", "without residual"):
        with pytest.raises(CheckFailed, match=broken):
            curves.check({"conv": {"fp32": found["fp32"], broken: found[broken]}})


def test_a_loss_that_is_no_number_does_not_pass():
    good, bad = curves.Curve([], 1.0), curves.Curve([], float("nan"))
    with pytest.raises(CheckFailed, match="gpt in int8: "):
        curves.check({"gpt": {"fp32": good, "int8": bad}})


def test_formats_are_judged_as_they_are_recommended():
    good, bad = curves.Curve([], 1.0), curves.Curve([], 1.1)
    found = {"fp32": good, "topk": bad, f"topk{curves.CHOSEN}": good}
    curves.check({"gpt": found})
    with pytest.raises(CheckFailed, match="recommended"):
        curves.check({"gpt": found | {f"topk{curves.CHOSEN}": bad}})
    assert curves.recommended("topk", 400).warmup_steps == 200
    assert curves.recommended("int8", 400) is None


def test_the_command(tmp_path):
    out = tmp_path / "curves.json"
    command = [
        sys.executable,
        "-m",
        "bench",
        "curves",
        "--steps",
        "4",
        "--wires",
        "int8",
    ]
    done = subprocess.run(
        [*command, "--tasks", "gpt", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr  # four steps need not suffice
    assert "gpt in int8: loss" in done.stdout
    result = json.loads(out.read_text())
    assert [row[0] for row in result["rows"]] == ["`fp32`", "`fp32, nudged`", "`int8`"]
    assert [len(points) for points in result["lines"]["gpt"].values()] == [4, 4, 4]


def test_unknown_names_are_refused():
    command = [sys.executable, "-m", "bench", "curves", "--wires", "int9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "int9" in done.stderr
    assert "int8" in done.stderr
