"""Trainings over MPI, which give the same bits as over Gloo."""

import re
import subprocess
import sys

import pytest
import torch

from tests.mpi import jobs, training


def test_stages_and_wires_of_fastddp():
    found = jobs.run_ranks(training.fast_ddp, 2, (0, 1, 2, 3), ("fp32", "int8"), True)
    assert found == [[], []]


def test_without_shared_memory():
    found = jobs.run_ranks(training.fast_ddp, 2, (0, 1, 2, 3), ("fp32", "int8"), False)
    assert found == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_wires_of_four_ranks(shared_memory):
    wires = ("fp8_e4m3", "int8", "int4")  # int4 has error feedback, which stage 3 refuses
    found = jobs.run_ranks(training.fast_ddp, 4, (0, 1), wires, shared_memory)
    assert found == [[]] * 4


@pytest.mark.slow
def test_nodes():
    found = jobs.run_ranks(training.hierarchical, 4, LOCAL_WORLD_SIZE="2")
    assert found == [([], 2)] * 4


def test_ddp_and_its_hooks():
    for found in jobs.run_ranks(training.ddp, 2):
        for name in ("plain", "fp16", "powerSGD"):
            ours, theirs = found[f"{name} over mpi"], found[f"{name} over gloo"]
            assert torch.equal(ours, theirs), name


def test_fully_shard():
    first, second = jobs.run_ranks(training.shards, 2)
    for name in ("fastsync", "torch"):
        assert torch.equal(first[f"{name} over mpi"], first[f"{name} over gloo"])
        assert torch.equal(first[f"{name} over mpi"], second[f"{name} over mpi"])
        torch.testing.assert_close(first[f"{name} over mpi"], first["ddp"])


@pytest.mark.slow
def test_a_mesh_of_two_dimensions():
    found = jobs.run_ranks(training.meshes, 4)
    assert [sums for sums, _, _ in found] == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
    for _, sharded, replicated in found:
        torch.testing.assert_close(sharded, replicated)


def test_a_distributed_checkpoint():
    for due, got, files in jobs.run_ranks(training.checkpoint, 2):
        assert torch.equal(due, got)
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]


HASHES = re.compile(r"(?:torch DDP|FastDDP  ) ([0-9a-f]{32})")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_hashes_of_the_demo(ranks):
    """With four ranks torch's DDP has the order of sums of its backend; FastDDP has its own."""
    ours = jobs.mpirun(ranks, "-m", "tests.mpi.demo_hashes", str(ranks), timeout=900)
    theirs = subprocess.run(
        [sys.executable, "-m", "tests.mpi.demo_hashes", str(ranks)],
        env=jobs.environment(),
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (ours.code, theirs.returncode) == (0, 0), ours.text + theirs.stdout
    found, due = HASHES.findall(ours.text), HASHES.findall(theirs.stdout)
    assert len(found) == len(due) == 4
    assert found == due if ranks == 2 else found[1::2] == due[1::2]
