"""Units of ranks that share a machine, which exchange through memory that they map."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from fastsync import FastDDP, RankMismatchError, Wire, fully_shard
from fastsync.testing import RankError, run_ranks
from tests.fsdp.fsdp_models import OPTIMIZERS, apply, loss_of, net, words

STEPS = 6


def segments():
    """Other ranks' segments that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = {line.split()[4] for line in lines if "memfd:fastsync" in line}
    return len(inodes)


def weights(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def train(rank, world, way, make, steps=STEPS):
    """Weights after some steps, accumulated ones among them, and how many segments are mapped."""
    os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[way]
    model = make()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(steps):
        for micro in range(1 + step % 2):
            loss_of(model, words(rank, 10 * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), segments()


def by_units():
    model = net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def by_stage():
    return FastDDP(net(), zero=3)


def by_large_units(**options):
    """Most shares are messages by themselves, of other sizes on the last rank."""
    return apply(fully_shard, net(2, width=256), **options)


def by_lower_units():
    lower = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    return by_large_units(mp_policy=lower)


WAYS = {
    "fully_shard": by_units,
    "zero=3": by_stage,
    "large": by_large_units,
    "lower precision": by_lower_units,
}


def both(rank, world, make):
    before = segments()
    ours, mapped = train(rank, world, "memory", make)
    assert mapped - before == world, "memory of every rank"
    theirs, after = train(rank, world, "group", make)
    assert after <= mapped, "no memory but the first model's"
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.slow(but=("large-2", "lower precision-3"))
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_through_the_group(world, way):
    for same in run_ranks(both, world, WAYS[way]):
        assert all(same)


def gradients_beside_ddp(rank, world, way):
    os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[way]
    found = []
    for model in (by_large_units(), DistributedDataParallel(net(2, width=256))):
        (2**20 * loss_of(model, words(rank, 0))).backward()  # or all were nearly zeros
        grads = [param.grad for param in model.parameters()]
        found.append([g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads])
    return found


@pytest.mark.parametrize("way", ["memory", "group"])
def test_gradients_of_large_shares_are_those_of_ddp(way):
    for ours, theirs in run_ranks(gradients_beside_ddp, 2, way):
        torch.testing.assert_close(ours, theirs)


def without_memory(rank, world):
    model = FastDDP(net(), zero=3, wire=Wire(shared_memory=False))
    loss_of(model, words(rank, 0)).backward()
    return segments()


@pytest.mark.slow
def test_shared_memory_false_goes_through_the_group():
    assert run_ranks(without_memory, 2) == [0, 0]


def disagree(rank, world):
    with pytest.raises(RankMismatchError, match="shared_memory") as caught:
        FastDDP(net(), zero=3, wire=Wire(shared_memory=rank == 0))
    return str(caught.value)


def test_ranks_agree_on_it():
    for text in run_ranks(disagree, 2):
        assert "True" in text and "False" in text


def gathers_again(rank, world, way, folder):
    """Tries to gather a unit three times after another rank has died."""
    os.environ["FASTSYNC_SHM"] = {"memory": "1", "group": "0"}[way]
    model = by_units()
    loss_of(model, words(rank, 0)).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outcomes = []
    for _ in range(3):
        try:
            model.blocks[0].unshard()
            outcomes.append("parameters")
        except RuntimeError:
            outcomes.append("error")
    Path(folder, str(rank)).write_text(", ".join(outcomes))


@pytest.mark.parametrize("way", ["memory", "group"])
def test_memory_that_nobody_has_filled_is_not_taken_for_parameters(way, tmp_path):
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        run_ranks(gathers_again, 2, way, str(tmp_path), grace=10.0)
    assert (tmp_path / "0").read_text() == "error, error, error"
