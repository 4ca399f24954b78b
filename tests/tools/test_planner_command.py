"""python -m fastsync.plan as users type it: text, and errors that name options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from fastsync.planner.command import main
from fastsync.planner.quantities import count, gigabytes, nbytes, rate, seconds, shape

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def build_model():
    blocks = (Block() for _ in range(6))
    return nn.Sequential(nn.Embedding(1000, 256), *blocks, nn.Linear(256, 1000))

def loss(output, batch):
    return output.logsumexp(-1).mean()

def seven_wide():
    return nn.Linear(7, 7)

def no_model():
    return 3

def no_number(output, batch):
    return output

def broken(output, batch):
    return output.nowhere
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train_of_test.py"
    path.write_text(TRAIN)
    return path


def plan(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_number_of_parameters_is_enough(capsys):
    assert plan("--params", "70e9", "--gpus", 8) == 0
    text = capsys.readouterr().out
    assert "70 B parameters" in text and "8 ranks over nccl" in text
    assert "Nothing fits: zero=3, checkpointing needs least" in text
    assert "Change the number of GPUs first: on 16, zero=3, checkpointing fits" in text


def rows(text):
    """By strategy: whether it fits, its peak and its step, as the table shows them."""
    found = re.findall(
        r"^  (zero=.*?|HSDP.*?)  +([\d.]+ .?B)  +(yes|no)  +\S+  +(.*?s)  ", text, re.M
    )
    return {name: (fits, peak, step) for name, peak, fits, step in found}


def milliseconds(text):
    number, unit = text.split()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def test_a_mode_is_chosen_for_the_network(train, capsys):
    """Averages at every step where the network keeps up; on a slow one codes, now and then."""
    asked = ("--model", f"{train}:build_model", "--batch", "8x64", "--gpus", 4, "--per-node", 2)
    asked += ("--device", "cpu", "--computing", "100ms", "--wires", "fp32,int4")
    asked += ("--sync", "local:8,diloco:64,delayed:1")
    chosen = {}
    for link in ("100Mbit/s", "100GB/s"):
        assert plan(*asked, "--inter", link) == 0
        text = capsys.readouterr().out
        assert "sync=LocalSGD(every=8) " in text and "sync=Delayed() " in text
        chosen[link] = text.splitlines()[-1]
    assert chosen["100Mbit/s"] == "At 12.5 MB/s choose sync=DiLoCo(every=64, wire='int4')."
    assert chosen["100GB/s"] == "At 100 GB/s choose every step."
    with pytest.raises(SystemExit):
        plan(*asked, "--sync", "gossip:3")
    assert "--sync" in capsys.readouterr().err


def test_a_model_is_planned(train, capsys):
    model = ("--model", f"{train}:build_model", "--loss", f"{train}:loss", "--batch", "8x64")
    where = ("--gpus", 16, "--device", "a100", "--wires", "fp32,int8", "--jitter", "0.02")
    assert plan(*model, *where) == 0
    text = capsys.readouterr().out
    found = rows(text)
    coded = {f"{stage}, wire='int8'" for stage in ("zero=0", "zero=1", "zero=2", "zero=3", "HSDP")}
    assert {"zero=0", "zero=3", "HSDP", *coded} <= set(found)
    assert {fits for fits, _, _ in found.values()} == {"yes"}
    fastest = min(milliseconds(step) for _, _, step in found.values())
    best = re.search(r"Take (.*): .* a step, of which", text)[1]
    assert milliseconds(found[best][2]) <= 1.04 * fastest
    assert "by GPUs" not in text, "of one number there is nothing to compare"


BUILDS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("scale", torch.ones(64))
        self.cached = None

    def forward(self, x):
        if self.cached is None:  # which a copy of another batch would not fit
            self.cached = torch.zeros(x.shape)
        return x * self.scale + self.cached + self.down(self.up(x).relu())


def build_model():
    return nn.Sequential(nn.Linear(64, 64), *(Block() for _ in range(4)), nn.BatchNorm1d(64))
"""


@pytest.mark.slow
def test_small_numbers_are_shown(tmp_path, capsys):
    """On a CPU, whose rate is no TFLOP/s; steps that are alike are said to be."""
    script = tmp_path / "builds.py"
    script.write_text(BUILDS)
    model = ("--model", f"{script}:build_model", "--batch", "64x64")
    assert plan(*model, "--gpus", 2, "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert "at 50% of cpu's peak and 80% of its memory's 10 GB/s" in text
    assert "Sequential, 136,640 parameters, batch 64" in text
    assert not re.search(r"\b0 [TG]?(FLOP|B)\b|0\.0% (faster|slower)|\b0\.0+ [MB] ", text), text


@pytest.mark.slow
def test_where_nothing_fits_a_remedy_is_named(train, capsys):
    model = ("--model", f"{train}:build_model", "--batch", "8x64", "--gpus", 2)
    assert plan(*model, "--memory", "1.51GB") == 0
    text = capsys.readouterr().out
    assert "Nothing fits" in text
    assert "first" in text


@pytest.mark.slow
def test_measured_computing_replaces_what_is_traced(train, capsys):
    model = ("--model", f"{train}:build_model", "--batch", "8x64", "--gpus", 2)
    assert plan(*model, "--computing", "61ms") == 0
    text = capsys.readouterr().out
    assert "measured: 61 ms for a forward and a backward" in text
    steps = {name: milliseconds(step) for name, (_, _, step) in rows(text).items()}
    assert steps["zero=0, checkpointing"] > 1.1 * steps["zero=0"] > 61
    assert steps["zero=0"] < 70


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--params", "many"), "--params"),
        (("--params", "7B", "--gpus", "12", "--batch", "1x8"), "--gpus"),
        (("--params", "7B", "--batch", "8"), "--batch"),
        (("--params", "7B", "--intra", "fast"), "--intra"),
        (("--model", "nowhere.py:f", "--batch", "2x2"), "--model"),
        (("--model", "nowhere", "--batch", "2x2"), "--model"),
        (("--model", "torch:nothing", "--batch", "2x2"), "--model"),
        (("--params", "7B", "--batch", "1x8", "--device", "abacus"), "--device"),
        (("--params", "7B", "--batch", "1x8", "--wires", "int9"), "--wires"),
        (("--params", "7B", "--batch", "1x8", "--jitter", "-1"), "--jitter"),
        (("--params", "7B", "--batch", "1x8", "--gpus", "8,12"), "--gpus: 12 do not fill"),
        (("--params", "7B", "--batch", "1x8", "--optimizer", "sgd"), "--optimizer sgd"),
        (("--params", "7B", "--loss", "train.py:loss"), "--loss"),
        ((), "--model"),
    ],
)
def test_bad_input_names_its_option(arguments, names, capsys):
    try:
        code = plan(*arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "error" in message
    assert names in message


def test_numbers_of_gpus_are_compared_in_any_order(capsys):
    tables = []
    for gpus in ("2,64", "64,2"):
        assert plan("--params", "1B", "--batch", "1x64", "--gpus", gpus) == 0
        lines = capsys.readouterr().out.split("by GPUs:\n")[1].splitlines()[1:]
        tables.append({line.split()[0]: line.split()[1:13] for line in lines})  # without HSDP
    assert tables[0] == tables[1] and list(tables[0]) == ["2", "64"]


def test_models_that_are_none_are_named(train, capsys):
    assert plan("--model", f"{train}:no_model", "--batch", "2x2") == 2
    assert "returned a int, no nn.Module" in capsys.readouterr().err


PARALLEL = """
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))

def cut():
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(DTensor.from_local(net.weight.detach(), mesh, [Shard(0)]))
    return net

def parallel():
    init_device_mesh("cpu", (1, 1))
    return nn.Linear(8, 8)
"""


@pytest.mark.parametrize(
    ("function", "told"), [("cut", "'weight' is a DTensor; "), ("parallel", "process groups; ")]
)
def test_models_of_which_ranks_have_parts_are_refused(function, told, tmp_path, capsys):
    path = tmp_path / "parallel_train_of_test.py"
    path.write_text(PARALLEL)
    try:
        assert plan("--model", f"{path}:{function}", "--batch", "2x8") == 2
    finally:
        dist.destroy_process_group()
    text = capsys.readouterr().err
    assert f"{told}the planner knows averages over all ranks alone" in text


@pytest.mark.parametrize(
    ("loss", "told"), [("broken", ": AttributeError"), ("no_number", " returned no number")]
)
def test_what_is_wrong_with_the_loss_names_it_alone(loss, told, train, capsys):
    options = ("--model", f"{train}:build_model", "--batch", "2x8", "--loss", f"{train}:{loss}")
    assert plan(*options) == 2
    assert capsys.readouterr().err.startswith(f"error: --loss {train}:{loss}{told}")


@pytest.mark.slow
def test_a_batch_that_the_model_does_not_take_is_named_in_one_line(train):
    """In a process of its own, since torch's log goes past the standard error of this one."""
    given = ("--model", f"{train}:seven_wide", "--batch", "2x8")
    command = [sys.executable, "-m", "fastsync.plan", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --model {train}:seven_wide with --batch 2x8: a step of")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_cannot_be_imported_is_named(tmp_path, capsys):
    path = tmp_path / "torn.py"
    path.write_text("def build_model(:")
    assert plan("--model", f"{path}:build_model", "--batch", "2x2") == 2
    assert f"--model: {path} cannot be imported: SyntaxError" in capsys.readouterr().err


def test_numbers_have_units():
    assert (count("70e9"), count("7B"), count("124m")) == (70 * 10**9, 7 * 10**9, 124 * 10**6)
    assert (rate("450GB/s"), rate("10Gbit/s"), nbytes("24GiB")) == (450e9, 1.25e9, 24 * 2**30)
    assert seconds("5us") == pytest.approx(5e-6)
    assert shape("8x1024") == (8, 1024)
    assert gigabytes(227.5e9) == "227.5 GB"
    for parse, text in ((rate, "5"), (nbytes, "GB"), (shape, "8x"), (count, "-3")):
        with pytest.raises(ValueError, match=re.escape(repr(text)) if parse is not shape else "''"):
            parse(text)


@pytest.mark.slow
def test_many_ranks_take_little_memory():
    options = "'--params 70e9 --batch 1x4096 --gpus 16384 --jitter 0.02'.split()"
    code = f"import resource; from fastsync.planner.command import main; main({options})"
    after = "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {after}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rsplit("peak", 1)[1]) < 2 * 2**20  # KiB


@pytest.mark.slow
def test_importing_fastsync_does_not_load_the_planner():
    code = (
        "import sys, fastsync; print([m for m in sys.modules if m.startswith('fastsync.planner')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
