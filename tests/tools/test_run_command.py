"""`python -m fastsync.run` and FASTSYNC_REPLACE_DDP, under torchrun on two ranks."""

import re
import subprocess
import sys

import pytest

from fastsync.run import main
from tests.helpers.scripts import ROOT, environment

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
IMPORTS

def main():
    dist.init_process_group("gloo")
    model = NAME(torch.nn.Linear(2, 1), bucket_cap_mb=1)
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    from torch.nn.parallel import DistributedDataParallel as Later
    holds = isinstance(model, torch.nn.parallel.distributed.DistributedDataParallel)
    wire = model._policy.wire.format if hasattr(model, "_policy") else "none"
    kind = "FastDDP" if "fastsync.ddp.fast_ddp" in str(type(model).__mro__) else "DDP"
    grad = model.module.weight.grad.flatten().tolist()
    print(f"<rank {dist.get_rank()}|{kind}|{wire}|{holds}|{isinstance(model, Later)}|{grad}"
          f"|{sys.argv[1:]}|{__name__}>", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
EARLY = "from torch.nn.parallel import DistributedDataParallel as DDP"
DEEP = "from torch.nn.parallel.distributed import DistributedDataParallel as DDP"
NAMED = "torch.nn.parallel.DistributedDataParallel"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def write(folder, imports=EARLY, name="DDP"):
    script = folder / "train_it.py"
    script.write_text(SCRIPT.replace("IMPORTS", imports).replace("NAME", name))
    return script


def run(*arguments, cwd=ROOT, code=0, **variables):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def check(out, wire, arguments=("--lr", "0.1")):
    told = [line.split("|") for line in sorted(re.findall(r"<rank (.*?)>", out))]
    for rank, row in enumerate(told):
        wanted = [str(rank), "FastDDP", wire, "True", "True", "[0.5, 0.5]"]
        assert row == [*wanted, str(list(arguments)), "__main__"]
    assert len(told) == 2


def lines(err):
    return [line for line in err.splitlines() if "in place of" in line]


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path):
    script = write(tmp_path)
    out, err = run(*TORCHRUN, "-m", "fastsync.run", "--with", "wire=bf16", script, "--lr", "0.1")
    check(out, "bf16")
    (line,) = lines(err)
    assert "fastsync: Linear, wrapped at" in line and f"{script}:9" in line
    assert "FastDDP(wire='bf16')" in line


@pytest.mark.slow
def test_it_starts_torchrun_and_names_reach_everyone(tmp_path):
    script = write(tmp_path, DEEP)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.argv_seen = 'the hidden one ran'\n")
    script.write_text(script.read_text() + "    print(sys.argv_seen)\n")
    variables = {"PYTHONPATH": f"{hidden}:{ROOT}"}
    options = ("--with", "wire=fp16,bucket_cap_mb=2", "--with", "zero=1")
    command = (sys.executable, *TORCHRUN, script, "--lr", "0.1")
    out, err = run("-m", "fastsync.run", *options, *command, **variables)
    check(out, "fp16")
    assert out.count("the hidden one ran") == 2
    (line,) = lines(err)
    assert "FastDDP(wire='fp16', bucket_cap_mb=2.0, zero=1)" in line


@pytest.mark.slow
def test_a_variable_and_a_module(tmp_path):
    write(tmp_path, "", NAMED)
    variables = {"FASTSYNC_REPLACE_DDP": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    out, err = run(*TORCHRUN, "-m", "fastsync.run", "-m", "train_it", cwd=tmp_path, **variables)
    check(out, "fp32", ())
    assert "FastDDP()" in lines(err)[0] and len(lines(err)) == 1


@pytest.mark.slow
def test_the_variable_alone_where_fastsync_is_imported(tmp_path):
    script = write(tmp_path, f"{EARLY}\nimport fastsync")
    out, _ = run(*TORCHRUN, script, FASTSYNC_REPLACE_DDP="wire=bf16")
    check(out, "bf16", ())


SPAWNING = ROOT / "tests" / "tools" / "spawning_script.py"


def check_spawned(out, wire):
    told = [line.split("|") for line in sorted(re.findall(r"<rank (.*?)>", out))]
    place = str(ROOT / "fastsync")
    assert told == [[str(rank), "FastDDP", wire, "[0.5, 0.5]", place] for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variable", "wire"),
    [
        (("--with", "wire=bf16", SPAWNING), "", "bf16"),
        (("-m", "tests.tools.spawning_script"), "wire=fp16", "fp16"),
        ((sys.executable, SPAWNING), "1", "fp32"),
    ],
    ids=["a script", "a module", "a command"],
)
def test_spawned_processes_get_it_too(arguments, variable, wire):
    out, err = run("-m", "fastsync.run", *arguments, FASTSYNC_REPLACE_DDP=variable)
    check_spawned(out, wire)
    (line,) = lines(err)
    assert f"{SPAWNING}:" in line


@pytest.mark.slow
def test_the_variable_alone_where_only_the_parent_imports_fastsync(tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING.read_text() + "    import fastsync\n")
    script.write_text(script.read_text().replace("    with ", "    import fastsync\n    with "))
    out, _ = run(script, FASTSYNC_REPLACE_DDP="wire=bf16")
    check_spawned(out, "bf16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--with", "wires=bf16", "x.py"), "--with 'wires=bf16': 'wires=bf16' is no option"),
        (("--with", "bucket_cap_mb=many", "x.py"), "bucket_cap_mb is a number, not 'many'"),
        (("--with", "static_graph=maybe", "x.py"), "static_graph is true or false, not 'maybe'"),
        (("--with", "wire=a", "--with", "wire=b", "x.py"), "gives wire twice"),
        ((), "the following arguments are required: PROGRAM"),
    ],
)
def test_mistakes_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_program_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr("fastsync.run.ask_to_replace", lambda options: None)
    with pytest.raises(SystemExit) as ended:
        main(["no_such_program"])
    assert ended.value.code == 2
    words = "is neither a script nor a command; a module needs -m"
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_options_in_two_places_are_refused(tmp_path):
    arguments = ("--with", "wire=bf16", write(tmp_path))
    _, err = run("-m", "fastsync.run", *arguments, code=2, FASTSYNC_REPLACE_DDP="1")
    assert "give the options in one place" in err


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "bucket_cap_mb" in out and "torchrun --nproc-per-node 2 -m fastsync.run" in out
