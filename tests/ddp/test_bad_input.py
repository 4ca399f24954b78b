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


# For each mistake: what rank 0 and rank 1 build, with which options, and what the error says.
GOOD = {}
CASES = {
    "shape": (linear, lambda: linear((5, 3)), GOOD, GOOD, ("rank 1", "shape", "weight", "(3, 5)")),
    "dtype": (
        linear,
        lambda: linear(dtype=torch.float64),
        GOOD,
        GOOD,
        ("rank 1", "dtype", "torch.float64", "weight"),
    ),
    "number": (
        linear,
        lambda: linear(bias=False),
        GOOD,
        GOOD,
        ("rank 1", "1 parameters", "rank 0 has 2", "'bias'", "only on rank 0"),
    ),
    "order": (
        lambda: Named("ab"),
        lambda: Named("ba"),
        GOOD,
        GOOD,
        ("rank 1", "parameter 0", "name 'b'", "same order"),
    ),
    "frozen on one rank": (
        lambda: Named("ab"),
        lambda: Named("ab", frozen="b"),
        GOOD,
        GOOD,
        ("rank 1", "requires_grad", "'b'"),
    ),
    "nothing to train": (
        lambda: Named("a", frozen="a"),
        lambda: Named("a", frozen="a"),
        GOOD,
        GOOD,
        ("requires a gradient", "Unfreeze"),
    ),
    "no parameters": (nn.ReLU, nn.ReLU, GOOD, GOOD, ("requires a gradient",)),
    "nothing to train on one rank": (
        lambda: Named("a"),
        lambda: Named("a", frozen="a"),
        GOOD,
        GOOD,
        ("rank 1: ", "requires a gradient"),
    ),
    "several devices": (half_on_meta, half_on_meta, GOOD, GOOD, ("cpu, meta", "same type")),
    "several devices on one rank": (
        half_on_meta,
        lambda: nn.Sequential(linear(), linear()),
        GOOD,
        GOOD,
        ("rank 0: ", "cpu, meta"),
    ),
    "an unsupported device": (
        lambda: nn.Linear(2, 2, device="meta"),
        lambda: nn.Linear(2, 2, device="meta"),
        GOOD,
        GOOD,
        ("meta",),
    ),
    "uninitialized": (lazy, lazy, GOOD, GOOD, ("uninitialized", "dummy forward")),
    "unknown wire": (linear, linear, {"wire": "fp7"}, {"wire": "fp7"}, ("'fp7'", "'bf16'")),
    "unknown wire on one rank": (
        linear,
        linear,
        GOOD,
        {"wire": "fp7"},
        ("rank 1: ", "'fp7'", "'bf16'"),
    ),
    "wires that differ": (
        linear,
        linear,
        {"wire": "bf16"},
        {"wire": "fp16"},
        ("rank 1", "wire is fp16 there but bf16 on rank 0", "same value everywhere"),
    ),
    "views that differ": (
        linear,
        linear,
        GOOD,
        {"gradient_as_bucket_view": False},
        ("rank 1", "gradient_as_bucket_view is False there"),
    ),
    "mixed precision": (
        linear,
        linear,
        {"mixed_precision": object()},
        {"mixed_precision": object()},
        ("mixed_precision must have the attributes param_dtype, reduce_dtype, buffer_dtype",),
    ),
    "several device ids": (
        linear,
        linear,
        {"device_ids": [0, 1]},
        GOOD,
        ("rank 0: ", "device_ids"),
    ),
    "an output device for the CPU": (
        linear,
        linear,
        GOOD,
        {"output_device": 0},
        ("rank 1: ", "output"),
    ),
    "a device id for the CPU": (linear, linear, {"device_ids": [0]}, GOOD, ("device_ids",)),
}
for label, cap in {"zero": 0, "negative": -1, "nan": float("nan")}.items():
    wrong = {"bucket_cap_mb": cap}
    CASES[f"cap {label}"] = (linear, linear, wrong, wrong, ("bucket_cap_mb", "positive"))
    CASES[f"cap {label} on one rank"] = (linear, linear, GOOD, wrong, ("rank 1: ", "bucket_cap_mb"))
for label, cap in {"infinite": float("inf"), "text": "25"}.items():
    CASES[f"cap {label} on one rank"] = (
        linear,
        linear,
        GOOD,
        {"bucket_cap_mb": cap},
        ("rank 1: ",),
    )
CASES["caps that differ"] = (
    linear,
    linear,
    {"bucket_cap_mb": 1},
    {"bucket_cap_mb": 2},
    ("rank 1", "bucket_cap_mb", "2"),
)


def wrap_wrongly(rank, world, label):
    first, second, first_options, second_options, _ = CASES[label]
    try:
        if rank == 0:
            FastDDP(first(), **first_options)
        else:
            FastDDP(second(), **second_options)
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        text = f"{error} {error.__cause__ or ''}"
        return text, kinds
    return "", ()


@pytest.mark.slow(but=("dtype",))
@pytest.mark.parametrize("label", CASES)
def test_every_rank_learns_what_is_wrong(label):
    parts = CASES[label][4]
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


def load_extension(tmp_path, kind="BuildError", **environment):
    """Output of a process that has to build the extension and cannot."""
    keep = {key: os.environ[key] for key in ("HOME", "LD_LIBRARY_PATH") if key in os.environ}
    here = str(Path(__file__).parents[2])
    env = {**keep, "FASTSYNC_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": here, **environment}
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert kind in done.stderr.splitlines()[-1]
    assert not list((tmp_path / "cache").glob("*/_C.so"))
    return done.stderr.splitlines()[-1]


def tool(folder, name, script="exit 0"):
    """An executable `name` in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_no_compiler(tmp_path):
    text = load_extension(tmp_path, PATH=str(tmp_path))
    assert "no C++ compiler: 'c++' is not on PATH" in text
    assert "apt-get install g++" in text
    assert "g++-99" in load_extension(tmp_path, PATH=str(tmp_path), CXX="g++-99")


@pytest.mark.slow
def test_no_ninja(tmp_path):
    tool(tmp_path / "bin", "c++")
    text = load_extension(tmp_path, PATH=str(tmp_path / "bin"))
    assert "ninja is not on PATH" in text
    assert "pip install ninja" in text


def with_tools(tmp_path):
    for name in ("c++", "ninja"):
        tool(tmp_path / "bin", name)
    return f"{tmp_path / 'bin'}:/usr/bin:/bin"


@pytest.mark.slow
def test_a_broken_cuda_compiler(tmp_path):
    path = with_tools(tmp_path)
    nvcc = tool(tmp_path / "bin", "nvcc", "echo 'ptxas went fishing' >&2; exit 1")
    text = load_extension(tmp_path, PATH=path, FASTSYNC_CUDA="1")
    assert str(nvcc) in text
    assert "ptxas went fishing" in text
    assert "FASTSYNC_CUDA=0" in text


@pytest.mark.slow
def test_cuda_home_without_a_toolkit(tmp_path):
    (tmp_path / "empty").mkdir()
    cuda = {"FASTSYNC_CUDA": "1", "CUDA_HOME": str(tmp_path / "empty")}
    text = load_extension(tmp_path, PATH=with_tools(tmp_path), **cuda)
    assert f"no nvcc in {tmp_path / 'empty'}/bin" in text
    assert "FASTSYNC_CUDA=0" in text


@pytest.mark.slow
def test_a_toolkit_that_was_asked_for(tmp_path):
    text = load_extension(tmp_path, PATH=str(with_tools(tmp_path)).split(":")[0], FASTSYNC_CUDA="1")
    assert "no nvcc in PATH" in text


@pytest.mark.slow
def test_a_wrong_variable_is_named(tmp_path):
    text = load_extension(tmp_path, "ValueError", PATH=with_tools(tmp_path), FASTSYNC_CUDA="maybe")
    assert "FASTSYNC_CUDA='maybe' is not one of auto, 0, 1" in text


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


def lack_kernels(rank, world):
    try:
        FastDDP(linear().to("meta") if rank == 1 else linear())
    except (BuildError, RankMismatchError) as error:
        return str(error)
    return ""


def test_kernels_that_one_rank_cannot_run():
    for text in run_ranks(lack_kernels, 2, timeout=30):
        assert "this build of fastsync has no kernels for meta" in text


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
