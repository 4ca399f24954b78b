"""Every benchmark as it is typed, with tiny settings: what it writes is complete."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench.commands import all as run_everything
from bench.commands import clip, zero
from bench.models import WORKLOADS
from bench.report import documents
from examples.common.ranks import USAGE, CheckFailed, Group
from examples.common.variants import VARIANTS
from fastsync.testing import run_ranks

ROOT = Path(__file__).parent.parent
OURS = {"fastsync", "fastsync_bf16", "fastsync_fp16"}
CLIPPED = re.compile(r"[+-]\d+\.\d\d % \([+-]\d+\.\d\d to [+-]\d+\.\d\d\)")
SOME = ("--wrappers", "ddp,ddp_fp16,fastsync,fastsync_bf16")

COMMANDS = {
    "step": ("--models", "small", "--scale", "0.01", "--rounds", "1", *SOME),
    "links": ("--links", "loopback", "--scale", "0.01", "--rounds", "1", *SOME),
    "kernels": ("--models", "small,gpt2", "--scale", "0.001", "--rounds", "1"),
    "overlap": ("--links", "loopback", "--backward", "1,2", "--scale", "0.01", "--rounds", "1"),
    "buckets": ("--models", "wide", "--scale", "0.01", "--sizes", "0.1,1", "--rounds", "1"),
    "scale": ("--parameters", "3,20", "--worlds", "2,4096", "--rounds", "1"),
    "allreduce": ("--sizes", "0.01,0.5", "--rounds", "2"),
    "zero": ("--models", "small,transformer", "--scale", "0.01", "--rounds", "1"),
    "zero3": ("--stages", "3", "--models", "gpt2", "--scale", "0.01", "--rounds", "1"),
    "clip": ("--models", "gpt2", "--scale", "0.002", "--rounds", "8"),
    "charged": ("--ways", "ddp_view,zero2", "--width", "252"),
}


# Their work is done in ranks; the others do some of it in the process that a user starts.
IN_RANKS = ("allreduce", "step", "links", "overlap", "buckets", "zero", "zero3", "clip")


def run_rank(rank, world, name, arguments):
    """What one rank of a command does."""
    benchmark = command.module_of("zero" if name == "zero3" else name).main
    group = Group(rank, world, torch.device("cpu"))
    assert benchmark.on_rank(benchmark.parser().parse_args(arguments), group) == 0


def bench(name, *arguments):
    command = [sys.executable, "-m", "bench", name, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def names(result, place):
    return {point["of"][place] for point in result["points"]}


def check_step(result):
    assert set(result["models"]) == {"small"}
    for model in result["models"].values():
        assert {"no_sync", "ddp", "ddp_fp16", "fastsync"} <= set(model["variants"])
        assert model["variants"]["ddp"]["check"] == "bit-identical"


def check_links(result):
    assert [record["link"] for record in result["links"]] == ["loopback"]


def check_kernels(result):
    assert names(result, 0) == {"small", "gpt2"}
    assert {"pack fp32>bf16", "unpack bf16>fp32", "encode int8", "select topk"} <= names(result, 1)
    ways = {"copy", "fastsync", "torch", "foreach_copy", "loop", "cat", "flatten"}
    assert names(result, 2) == ways
    for point in result["points"]:
        assert point["gbps"] > 0
        if point["of"][2] == "copy":
            assert point["ratio"]["median"] == 1.0


def check_overlap(result):
    assert names(result, 2) == {"paced"}
    assert names(result, 3) == {"1", "2"}
    assert "bare" in names(result, 4)
    for point in result["points"]:
        if point["of"][4] == "no_sync":
            assert point["least"] is None
        else:
            assert point["least"] >= 0
            assert (point["least_of_plan"] is None) == (point["of"][4] not in OURS)


def check_buckets(result):
    found = {tuple(point["of"][3:]): point for point in result["points"]}
    assert {size for _, size in found} == {"default", "0.1 MiB", "1 MiB", "-"}
    assert len(found["fastsync", "0.1 MiB"]["plan"]) > len(found["fastsync", "1 MiB"]["plan"])


def check_scale(result):
    assert names(result, 0) == {"fake group", "loopback"}
    assert names(result, 1) == {"2 ranks", "4096 ranks"}
    assert {"plan", "wrap", "backward", "ddp", "fastsync"} <= names(result, 2)


def check_charged(result):
    (_, whole, _), (_, shared, rest) = result["rows"]
    assert 1.0 < float(rest[:-1]) <= float(shared[:-1]) < float(whole[:-1])


def check_allreduce(result):
    assert [row[0] for row in result["rows"]] == ["0.01", "0.5"]
    for _, gloo, ours, ratio, share in result["rows"]:
        assert float(gloo) > 0 < float(ours)
        assert ratio.endswith("x") and share.endswith("%")


def check_zero(result):
    """The fastest of torch's ways is the base; what nobody counts is left out."""
    stages, rows = zero.STAGES["1,2"], {row[0].strip("`"): row for row in result["rows"]}
    assert list(rows) == [*stages.others, *stages.wrapped]
    assert result["headers"][1:3] == ["small", "transformer"]
    for column in (1, 2):
        assert [" ms" in row[column] for row in rows.values()].count(True) == 1
        assert any(" ms" in rows[name][column] for name in stages.others)
    for name, row in rows.items():
        if name in stages.others:
            assert row[-2] == "-"
        else:  # gradients, and parameters, of 8 of 32 bits
            wanted = {"int8": 0.625, "both": 0.25}.get(name.rpartition("_")[2], 1.0)
            assert wanted <= float(row[-2]) < wanted + 0.03  # of scales, flags and padding
    assert 0 <= int(rows["fastsync_zero2"][-1]) < 60 < int(rows["FSDP2, not resharded"][-1])


def check_zero3(result):
    """Beside DDP and beside FSDP2. The root's parameters are gathered once, all others twice."""
    stages, rows = zero.STAGES["3"], {row[0].strip("`"): row for row in result["rows"]}
    assert list(rows) == [*stages.others, *stages.wrapped]
    assert result["headers"][1:3] == [f"gpt2 / {zero.DDP}", "gpt2 / FSDP2"]
    assert " ms" in rows[zero.DDP][1] and " ms" in rows["FSDP2"][2]
    assert rows["no_sync"][-2:] == ["-", "+0"]
    exact, coded = (float(rows[f"fastsync_zero3{how}"][-2]) for how in ("", "_int8_both"))
    assert 1.0 < exact <= 1.5 and exact / 4 < coded < exact / 3.5  # of scales and padding
    assert int(rows["fastsync_zero3"][-1]) < int(rows["FSDP2"][-1])


def check_clip(result):
    ways = [clip.NONE, *(name + how for how in clip.LIMITS for name in clip.CLIPS)]
    named = [(f"`zero={stage}`", way) for stage in clip.STAGES for way in ways]
    assert [tuple(row[:2]) for row in result["rows"]] == named
    for _, way, cost in result["rows"]:
        assert cost.endswith(" ms, 8 blocks") if way == clip.NONE else CLIPPED.fullmatch(cost)


def wrong_weights(rank, world):
    group = Group(rank, world, torch.device("cpu"))
    workload = WORKLOADS["small"](scale=0.01)
    makes = {zero.DDP: VARIANTS[zero.DDP], "alone": VARIANTS["no_sync"]}
    lanes = {name: zero.by(variant)(workload, group) for name, variant in makes.items()}
    try:
        zero.check(lanes, group, 2)
    except CheckFailed as error:
        return str(error)


def test_a_way_that_trains_other_weights_is_not_timed():
    assert all("alone: weights are" in text for text in run_ranks(wrong_weights, 2))


def wrong_clips(rank, world, how):
    group = Group(rank, world, torch.device("cpu"))
    lane = clip.make(WORKLOADS["small"](scale=0.01), "1", group)
    wrong = {
        "half": lambda norm, lane: lane.model.clip_grad_norm_(norm) / 2,
        "none": lambda norm, lane: torch.zeros(()),
    }
    clip.CLIPS["torch's"] = wrong[how]
    args = clip.main.parser().parse_args(["--rounds", "2"])
    try:
        clip.blocks(lane, group, args)
    except CheckFailed as error:
        return str(error)


@pytest.mark.parametrize("how", ["half", "none"])
def test_clipping_to_another_norm_is_not_timed(how):
    assert all("find norms that differ" in text for text in run_ranks(wrong_clips, 2, how))


def test_what_clipping_costs_is_told_apart_from_the_noise_of_backward():
    """Medians, and the 40th and the 61st of 100 differences, whatever backward took."""
    backward = [1.0 + 0.5 * (index % 7) for index in range(100)]
    extra = [0.001 * (1 + index * 37 % 100) for index in range(100)]
    steps = {
        clip.NONE: [(seconds + 0.5, 0.5) for seconds in backward],
        "other": [(s + 0.5 + e, 0.5 + e) for s, e in zip(reversed(backward), extra, strict=True)],
    }
    found, base = clip.cells(steps), 1.0 + 0.5 * 3 + 0.5
    assert found[clip.NONE] == f"{1e3 * base:.1f} ms, 100 blocks"
    low, middle, high = (f"+{100 * cost / base:.2f}" for cost in (0.040, 0.0505, 0.061))
    assert found["other"] == f"{middle} % ({low} to {high})"


@pytest.mark.parametrize("name", IN_RANKS)
def test_ranks_write_complete_results(name, tmp_path):
    path = tmp_path / "result.json"
    run_ranks(run_rank, 2, name, (*COMMANDS[name], "--json", str(path)), timeout=300)
    result = json.loads(path.read_text())
    globals()[f"check_{name}"](result)
    assert result["environment"]["torch"]


@pytest.mark.parametrize("name", ["links", "kernels", "scale", "charged"])
def test_command(name, tmp_path):
    path = tmp_path / f"{name}.json"
    done = bench(name, *COMMANDS[name], "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    globals()[f"check_{name}"](result)
    assert result["environment"]["torch"] and result["command"].startswith("python")
    assert str(tmp_path) not in path.read_text(), "results hold no paths"
    assert result["kind"] == name
    found = result["links"][0]["variants"] if name == "links" else result["points"]
    assert len(documents.figures(name, tmp_path).splitlines()) > len(found) / 4 > 0.5


BAD_INPUT = {
    "step": ("--ranks", "two"),
    "kernels": ("--cases", "pack fp7>fp32"),
    "overlap": ("--backward", "0"),
    "buckets": ("--sizes", "-1"),
    "zero": ("--models", "large"),
    "scale": ("--worlds", "0"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line(name, capsys):
    assert command.main([name, *BAD_INPUT[name]]) == USAGE
    said = capsys.readouterr().err
    assert said.startswith("error: ") and BAD_INPUT[name][1] in said and said.count("\n") == 1


def test_jobs_of_several_worlds_make_one_result(tmp_path):
    """Started as a user does; a model's name tells the number of ranks."""
    path = tmp_path / "step.json"
    done = bench("step", *COMMANDS["step"], "--ranks", "1,2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert set(result["models"]) == {"small, 1 ranks", "small, 2 ranks"}
    assert result["environment"]["ranks"] == "1 and 2"


def test_everything_is_listed_and_chosen(capsys):
    assert command.main(["all", "--list", "--only", "ops,links", "--skip", "links"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ops"]
    for wrong in (["--only", "nothing"], ["--only", "ops", "--skip", "ops"]):
        assert command.main(["all", "--list", *wrong]) == USAGE
    assert sum(part.seconds for part in run_everything.PARTS.values()) < 48 * 60


@pytest.mark.parametrize("path", sorted(ROOT.glob("bench/results/*.json")), ids=lambda p: p.stem)
def test_the_command_of_every_result_can_be_typed(path):
    python, _, module, *arguments = json.loads(path.read_text())["command"].split()
    assert python == "python"
    if module == "bench":
        command.module_of(arguments.pop(0)).main.parser().parse_args(arguments)
    else:
        assert module.startswith(("docs.measure_", "tests."))
        name = f"{module}.__main__" if module == "tests.random_faults" else module
        found = importlib.import_module(name)
        made = found.parser() if hasattr(found, "parser") else found.main.parser()
        made.parse_args(arguments)


def test_documents_name_commands_that_exist():
    named = {}
    for path in [*documents.documents(), ROOT / "Makefile", ROOT / "bench" / "gpu_all.sh"]:
        found = re.findall(r"-m bench([ .])(\w+)", path.read_text())
        assert all(between == " " for between, _ in found), path.name
        named |= {name: path.name for _, name in found}
    assert len(named) > 15
    for name, where in named.items():
        assert name in command.COMMANDS, f"{where}: python -m bench {name}"
