"""Every example and every benchmark runs, once, as small as it gets."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench.measure.netns import most_within
from bench.report import documents
from examples.common.ranks import USAGE, Group
from fastsync.testing import run_ranks
from tests.helpers.scripts import environment

ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
TRAINING = ("--epochs", "1", "--samples", "64", "--batch", "8", "--accumulate", "2")
# How each is started. CI runs the whole demo; tests/mpi runs what needs mpirun.
EXAMPLES = {
    "custom_codec": (),
    "demo": ("--help",),
    "experts": ("--steps", "3"),
    "limited_memory": ("--help",),
    "manual_parallel": ("--rounds", "2", "--steps", "1"),
    "mpi": ("--help",),
    "padded": ("--steps", "3"),
    "ring_allreduce": ("--ranks", "2", "--numel", "10"),
    "training": TRAINING,
}
SOME = ("--wrappers", "ddp,ddp_fp16,fastsync,fastsync_bf16")
TINY = ("--scale", "0.01")
ROUND = ("--rounds", "1")
# Arguments of each benchmark on ranks that are there.
ON_RANKS = {
    "allreduce": ("--sizes", "0.01,0.5", "--rounds", "2"),
    "buckets": ("--models", "wide", *TINY, "--sizes", "0.1,1", *ROUND),
    "memory": ("--models", "wide", *TINY, *SOME),
    "modes": ("--steps", "2", "--seeds", "1", "--tasks", "gpt"),
    "mpi": ("--models", "small", *TINY, *ROUND),
    "ops": (*TINY, *SOME),
    "overlap": ("--links", "loopback", "--backward", "1,2", *TINY, *ROUND),
    "parity": ("--models", "small", *TINY, "--wrappers", "fastsync", "--steps", "2"),
    "shares": ("--models", "small,paced", *TINY, "--steps", "1", "--total", "4", "--seconds", "1"),
    "sync": ("--link", "loopback", *TINY, "--every", "4", "--per-node", "1", *ROUND),
    "step": ("--models", "small", *TINY, *ROUND, *SOME),
    "zero": ("--models", "small", *TINY, *ROUND),
}
# Those that work in the process which a user starts, and one that starts ranks.
TYPED = {
    "accuracy": (),
    "charged": ("--ways", "ddp_view,zero2", "--width", "252"),
    "kernels": ("--models", "small", "--scale", "0.001", "--cases", "pack", *ROUND),
    "links": ("--links", "loopback", *TINY, *ROUND, *SOME),
    "scale": ("--parameters", "3,20", "--worlds", "2,4096", *ROUND),
}
ELSEWHERE = {
    "all": "which runs the others",
    "curves": "whose formats fail after few steps",
    "graphs": "which needs a GPU",
    "overhead": "which needs a GPU",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with examples/ in it, and one that stands for site-packages: fastsync alone."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copytree(ROOT / "examples", folder / "here" / "examples")
    (folder / "site").mkdir()
    (folder / "site" / "fastsync").symlink_to(ROOT / "fastsync")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_copied_example_runs(alone, name):
    launcher = TORCHRUN if name == "training" else ()
    arguments = [*launcher, f"examples.{name}", *EXAMPLES[name]]
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=alone / "here",
        env=environment() | {"PYTHONPATH": str(alone / "site"), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def run_rank(rank, world, name, arguments):
    """Run one rank of a command."""
    os.environ.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")  # read by accelerate
    benchmark = command.module_of(name).main
    group = Group(rank, world, torch.device("cpu"))
    assert benchmark.on_rank(benchmark.parser().parse_args(arguments), group) == 0


def check(path, name):
    result = json.loads(path.read_text())
    assert result["environment"]["torch"]
    assert any(result.get(part) for part in ("rows", "points", "models", "links")), name
    assert str(path.parent) not in path.read_text(), "results hold no paths"


@pytest.mark.slow(
    but=(
        "step",
        "allreduce",
    )
)
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_benchmark_runs_on_ranks(name, tmp_path):
    path = tmp_path / "result.json"
    run_ranks(run_rank, 2, name, (*ON_RANKS[name], "--json", str(path)), timeout=300)
    check(path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_a_benchmark_runs_as_it_is_typed(name, tmp_path):
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, *TYPED[name], "--json", str(path)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check(path, name)


def test_every_program_is_tried():
    assert {p.stem for p in ROOT.glob("examples/*.py") if "__main__" in p.read_text()} == {
        *EXAMPLES
    }
    here = {p.stem for p in ROOT.glob("bench/commands/[a-z]*.py")}
    assert here == {*ON_RANKS, *TYPED, *ELSEWHERE}


def test_bad_input_is_one_line(capsys):
    assert command.main(["kernels", "--cases", "pack fp7>fp32"]) == USAGE
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "pack fp7>fp32" in said and said.count("\n") == 1


def test_the_command_of_every_result_can_be_typed():
    for path in sorted(ROOT.glob("bench/results/*.json")):
        typed = json.loads(path.read_text())["command"]
        python, _, module, *arguments = shlex.split(typed)
        assert python == "python"
        if module == "bench":
            command.module_of(arguments.pop(0)).main.parser().parse_args(arguments)
            continue
        assert module.startswith(("docs.measure_", "tests."))
        name = f"{module}.__main__" if module == "tests.fuzz.random_faults" else module
        found = importlib.import_module(name)
        made = found.parser() if hasattr(found, "parser") else found.main.parser()
        made.parse_args(arguments)


def test_documents_name_commands_that_exist():
    for path in [*documents.documents(), ROOT / "Makefile", ROOT / "bench" / "gpu_all.sh"]:
        for name in re.findall(r"-m bench (\w+)", path.read_text()):
            assert name in command.COMMANDS, f"{path.name}: python -m bench {name}"


def test_the_most_that_grows_within_a_window():
    even = [(0.01 * i, 5.0 * i) for i in range(100)]
    assert most_within(even, 0.1) == pytest.approx(50)
    burst = [(when, count + 70 * (when > 0.305)) for when, count in even]
    assert most_within(burst, 0.1) == pytest.approx(120)
    assert most_within([(0.0, 0.0), (1.0, 500.0)], 0.1) == pytest.approx(50)
