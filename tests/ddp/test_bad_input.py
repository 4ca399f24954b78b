"""Mistakes of users: an error on every rank, within seconds, that names the
cause and the remedy.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import BuildError, FastDDP, RankMismatchError
from fastsync.reducer.monitor import wrapping
from tests.helpers.teams import run_ranks


def linear(sizes=(4, 3), dtype=None, bias=True):
    return nn.Linear(*sizes, dtype=dtype, bias=bias)


class Named(nn.Module):
    def __init__(self, names, frozen=()):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(3), name not in frozen))


def half_on_meta():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def lazy():
    return nn.LazyLinear(3)


def two_layers():
    return nn.Sequential(linear(), linear())


def frozen():
    return Named("a", frozen="a")


# For each mistake: what the error says, what rank 0 and rank 1 build, and with which options.
# What `agree()` finds is in test_rank_mismatch.py, and what torch's front says in
# test_replaced_ddp.py.
CASES = {
    "dtype": (
        ("rank 1", "dtype", "torch.float64", "weight"),
        [linear, lambda: linear(dtype=torch.float64)],
    ),
    "number": (
        ("rank 1", "1 parameters", "rank 0 has 2", "'bias'", "only on rank 0"),
        [linear, lambda: linear(bias=False)],
    ),
    "order": (
        ("rank 1", "parameter 0", "name 'b'", "same order"),
        [lambda: Named("ab"), lambda: Named("ba")],
    ),
    "nothing to train": (("requires a gradient", "Unfreeze"), [frozen, frozen]),
    "no parameters": (("requires a gradient",), [nn.ReLU, nn.ReLU]),
    "nothing to train on one rank": (
        ("rank 1: ", "requires a gradient"),
        [lambda: Named("a"), frozen],
    ),
    "several devices": (("cpu, meta", "same type"), [half_on_meta, half_on_meta]),
    "several devices on one rank": (("rank 0: ", "cpu, meta"), [half_on_meta, two_layers]),
    "an unsupported device on one rank": (
        ("this build of fastsync has no kernels for meta",),
        [linear, lambda: linear().to("meta")],
    ),
    "uninitialized": (("uninitialized", "dummy forward"), [lazy, lazy]),
    "unknown wire": (("'fp7'", "'bf16'"), [], {"wire": "fp7"}, {"wire": "fp7"}),
    "unknown wire on one rank": (("rank 1: ", "'fp7'", "'bf16'"), [], {}, {"wire": "fp7"}),
    "wires that differ": (
        ("rank 1", "wire is fp16 there but bf16 on rank 0", "same value everywhere"),
        [],
        {"wire": "bf16"},
        {"wire": "fp16"},
    ),
    "views that differ": (
        ("rank 1", "gradient_as_bucket_view is False there"),
        [],
        {},
        {"gradient_as_bucket_view": False},
    ),
    "mixed precision": (
        ("mixed_precision must have the attributes param_dtype, reduce_dtype, buffer_dtype",),
        [],
        {"mixed_precision": object()},
        {"mixed_precision": object()},
    ),
    "several device ids on one rank": (("rank 0: ", "device_ids"), [], {"device_ids": [0, 1]}),
    "an output device for the CPU": (("rank 1: ", "output"), [], {}, {"output_device": 0}),
    "cap": (("bucket_cap_mb", "positive"), [], {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0}),
    "cap on one rank": (("rank 1: ", "bucket_cap_mb"), [], {}, {"bucket_cap_mb": float("nan")}),
    "cap that is a text": (("rank 1: ",), [], {}, {"bucket_cap_mb": "25"}),
    "caps that differ": (
        ("rank 1", "bucket_cap_mb", "2"),
        [],
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 2},
    ),
}


def wrap_wrongly(rank, world, label):
    _, models, *options = CASES[label]
    try:
        FastDDP((models or [linear, linear])[rank](), **[*options, {}, {}][rank])
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        text = f"{error} {error.__cause__ or ''}"
        return text, kinds
    return "", ()


@pytest.mark.slow(but=("dtype",))
@pytest.mark.parametrize("label", CASES)
def test_every_rank_learns_what_is_wrong(label):
    parts = CASES[label][0]
    for text, kinds in run_ranks(wrap_wrongly, 2, label, timeout=30):
        assert text, "no error"
        for part in parts:
            assert part in text, text
        assert {"RuntimeError", "ValueError", "TypeError"} & set(kinds)


def mismatch_is_one_type(rank, world):
    try:
        FastDDP(linear((4, 3 + rank)))
    except RankMismatchError:
        return True
    return False


def test_a_mismatch_has_a_type_of_its_own():
    assert run_ranks(mismatch_is_one_type, 3) == [True] * 3


def wrap_without_group(rank, world):
    group = dist.group.WORLD
    dist.destroy_process_group()
    try:
        FastDDP(linear())
    except ValueError as error:
        return str(error)
    finally:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # run_ranks ends one
    return group


def test_without_a_process_group():
    for text in run_ranks(wrap_without_group, 2):
        assert "init_process_group" in text
        assert "torchrun" in text


def convert_after_wrapping(rank, world):
    model = FastDDP(linear())
    model.double()
    try:
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_converted_after_it_was_wrapped():
    for rank, text in enumerate(run_ranks(convert_after_wrapping, 2)):
        assert f"rank {rank}" in text
        assert "Wrap it afterwards" in text or "then wrap it" in text


def register_hook(rank, world):
    try:
        FastDDP(linear(), wire="bf16").register_comm_hook(None, lambda state, bucket: None)
    except ValueError as error:
        return str(error)
    return ""


def test_a_communication_hook_beside_a_narrow_wire():
    assert all("wire='bf16'" in text for text in run_ranks(register_hook, 2))


LOAD = "from fastsync._build import extension; extension.load()"


def load_extension(tmp_path, **environment):
    """Output of a process that has to build the extension and cannot."""
    keep = {key: os.environ[key] for key in ("HOME", "LD_LIBRARY_PATH") if key in os.environ}
    here = str(Path(__file__).parents[2])
    env = {**keep, "FASTSYNC_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": here, **environment}
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert not list((tmp_path / "cache").glob("*/_C.so"))
    return done.stderr.splitlines()[-1]


def tool(folder, name, script="exit 0"):
    """An executable `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


ALL_TOOLS = {"c++": "exit 0", "ninja": "exit 0"}
FISHING = {"nvcc": "echo 'ptxas went fishing' >&2; exit 1"}
ASKED = {"FASTSYNC_CUDA": "1"}
# What is on PATH, the environment's variables, and what the error says; {} is the test's folder.
BUILDS = {
    "no compiler": (
        {},
        {},
        ("BuildError: no C++ compiler: 'c++' is not on PATH", "apt-get install g++"),
    ),
    "no such compiler": ({}, {"CXX": "g++-99"}, ("g++-99",)),
    "no ninja": ({"c++": "exit 0"}, {}, ("ninja is not on PATH", "pip install ninja")),
    "broken nvcc": (
        ALL_TOOLS | FISHING,
        ASKED,
        ("{}/bin/nvcc", "ptxas went fishing", "FASTSYNC_CUDA=0"),
    ),
    "empty toolkit": (
        ALL_TOOLS,
        ASKED | {"CUDA_HOME": "{}/empty"},
        ("no nvcc in {}/empty/bin", "FASTSYNC_CUDA=0"),
    ),
    "no toolkit": (ALL_TOOLS, ASKED, ("no nvcc in PATH",)),
    "wrong variable": (
        ALL_TOOLS,
        {"FASTSYNC_CUDA": "maybe"},
        ("ValueError", "FASTSYNC_CUDA='maybe' is not one of auto, 0, 1"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILDS)
def test_an_extension_that_cannot_be_built(tmp_path, kind):
    tools, variables, said = BUILDS[kind]
    for name, script in tools.items():
        tool(tmp_path / "bin", name, script)
    shell = ":/usr/bin:/bin" if "nvcc" in tools else ""
    variables = {name: value.format(tmp_path) for name, value in variables.items()}
    text = load_extension(tmp_path, PATH=f"{tmp_path / 'bin'}{shell}", **variables)
    assert all(part.format(tmp_path) in text for part in said), text


def fail_to_build(rank, world):
    """One rank's machine lacks a compiler; the extension that the fork inherited is forgotten."""
    from fastsync._build import extension

    if rank == 1:
        extension.load.cache_clear()
        extension._built = no_compiler
    try:
        FastDDP(linear())
    except RuntimeError as error:
        return f"{error} {error.__cause__ or ''}", isinstance(error, BuildError | RankMismatchError)
    return "", False


def no_compiler(env):
    raise BuildError("no C++ compiler on this machine")


def test_an_extension_that_one_rank_cannot_build():
    for text, kind in run_ranks(fail_to_build, 2, timeout=30):
        assert kind
        assert "rank 1: no C++ compiler" in text


def refused_by_nccl(rank, world, words):
    """Return how an error of NCCL reads while a model is wrapped."""
    try:
        with wrapping(dist.group.WORLD):
            raise dist.DistBackendError(words)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_that_share_a_gpu_are_told_the_remedy():
    """With NCCL's own words; `test_cuda_ddp.py` has NCCL say them."""
    said = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000"
    for found in run_ranks(refused_by_nccl, 1, said):
        assert found.startswith("RuntimeError: two ranks use the same GPU")
        assert "LOCAL_RANK" in found and said in found
    for found in run_ranks(refused_by_nccl, 1, "unhandled system error"):
        assert found == "DistBackendError: unhandled system error"
