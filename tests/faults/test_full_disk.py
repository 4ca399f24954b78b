"""A full disk of one rank when a checkpoint is written: all get the error, and nothing is lost."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from fastsync.testing import run_ranks
from tests.zero.zero_checkpoints import load, made, same, save, train

FULL = 1  # the rank


def fill(folder):
    """Let every file of rank FULL find no room."""
    os.makedirs(folder)
    os.symlink("/dev/full", f"{folder}/__{FULL}_0.distcp")


def weights_of(module):
    return [p.detach().clone() for p in module.parameters()]


def undisturbed(rank, world, stage, options):
    module, model, optimizer = made("adamw", stage, **options)
    train(model, optimizer, range(4), rank, world)
    return weights_of(module)


def saved_in_vain(rank, world, stage, options, folder):
    """Return the error's text, the weights of a training that goes on, and more.

    More: whether the checkpoint seems to be whole, and the seconds until the error.
    """
    module, model, optimizer = made("adamw", stage, **options)
    train(model, optimizer, range(2), rank, world)
    save(model, optimizer, f"{folder}/earlier")
    earlier = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [2], rank, world)
    if rank == 0:
        fill(f"{folder}/later")
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        save(model, optimizer, f"{folder}/later")
    seconds = time.monotonic() - began
    train(model, optimizer, [3], rank, world)
    weights = weights_of(module)
    load(model, optimizer, f"{folder}/earlier")
    same(optimizer.state_dict(), earlier)
    return str(caught.value), weights, os.path.exists(f"{folder}/later/.metadata"), seconds


WAYS = {
    "fp32": (2, 0, {}),
    "int8": (3, 0, {"wire": "int8"}),
    "zero1": (4, 1, {}),
    "zero2": (3, 2, {}),
}


@pytest.mark.slow(but=("fp32",))
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_learns_whose_disk_is_full_and_trains_on(way, tmp_path):
    world, stage, options = WAYS[way]
    wanted = run_ranks(undisturbed, world, stage, options)
    found = run_ranks(saved_in_vain, world, stage, options, str(tmp_path))
    for (text, weights, seems_whole, _), sound in zip(found, wanted, strict=True):
        assert f"ranks:dict_keys([{FULL}])" in text and "No space left on device" in text
        assert all(map(torch.equal, weights, sound))
        assert not seems_whole, "a reader could take it for a checkpoint"
