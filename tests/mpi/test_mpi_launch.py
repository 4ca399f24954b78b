"""How a script comes to its rank under mpirun."""

import pytest
import torch
import torch.distributed as dist

from fastsync._build import env
from tests.mpi import jobs

SCRIPT = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group({backend!r})
model = DistributedDataParallel(torch.nn.Linear(3, 1))
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
kinds = [kind.__name__ for kind in type(model).__mro__ if kind.__name__ == "FastDDP"]
print("<" + " ".join([*kinds, *(os.environ[n] for n in names)]) + ">", flush=True)
model(torch.ones(2, 3)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow("gloo")
@pytest.mark.parametrize("backend", ["fastsync_mpi", "gloo"])
def test_a_script_of_torchruns_runs_under_mpirun(tmp_path, backend):
    """It knows nothing of fastsync, which `fastsync.run` puts in; the store serves Gloo, too."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(backend=backend))
    ended = jobs.mpirun(2, "-m", "fastsync.run", str(script))
    assert ended.code == 0, ended.text
    assert "<FastDDP 0 2 0 2>" in ended.text and "<FastDDP 1 2 1 2>" in ended.text, ended.text


@pytest.mark.slow
def test_the_example():
    ended = jobs.mpirun(2, "-m", "examples.mpi", "--steps", "10", "--wire", "int8")
    assert ended.code == 0 and "2 ranks over MPI" in ended.text, ended.text


@pytest.mark.slow
def test_the_benchmark():
    options = ("--models", "small", "--scale", "0.01", "--rounds", "1", "--seconds", "1")
    ended = jobs.mpirun(2, "-m", "bench", "mpi", *options)
    assert ended.code == 0, ended.text
    for name in ("small over MPI", "ddp_mpi", "fastsync_group_mpi"):
        assert name in ended.text, ended.text


def mixed(rank, world):
    """MPI carries CPU tensors of a group whose other tensors another backend carries."""
    group = dist.new_group(backend="cpu:fastsync_mpi,cuda:gloo")
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    return float(total.sum()), group._get_backend(torch.device("cpu")).name()


@pytest.mark.slow
def test_beside_another_backend():
    assert jobs.run_ranks(mixed, 2) == [(6.0, "fastsync_mpi")] * 2


@pytest.mark.slow
def test_with_torchs_debugging():
    """Each collective is then compared between ranks by torch, over Gloo."""
    assert jobs.run_ranks(mixed, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL")[0][0] == 6.0


def test_variables_that_are_there_stay(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("MASTER_PORT", "1")
    env.set_missing({"RANK": 0, "WORLD_SIZE": 2}, {"MASTER_ADDR": "here", "MASTER_PORT": 2})
    known = env.inherited({})
    assert (known["RANK"], known["WORLD_SIZE"], known["MASTER_PORT"]) == ("5", "2", "1")
    assert "MASTER_ADDR" not in known  # half an address is none


def test_launchers_of_mpi_are_known():
    assert not env.launched_by_mpi({"RANK": "0", "SLURM_PROCID": "0"})
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        assert env.launched_by_mpi({name: "0"})
