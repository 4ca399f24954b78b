"""reshard_after_forward as a number: few ranks keep what backward gathers."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor

from fastsync import fully_shard
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import (
    OPTIMIZERS,
    apply,
    farthest,
    loss_of,
    mesh_of,
    net,
    train,
    whole,
    words,
)
from tests.helpers.teams import run_ranks

LOWER = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def trained(rank, world, number, rows, options):
    """Weights with a number, with True, and with FSDP2."""
    found, mesh = [], mesh_of(world, rows)
    for shard, after in ((fully_shard, number), (fully_shard, True), (torchs, number)):
        model = apply(shard, net(), mesh=mesh, reshard_after_forward=after, **options)
        found.append(train(model, rank, OPTIMIZERS["adamw"](model.parameters()))[0])
    return farthest(found[0], found[1]), farthest(found[0], found[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "number", "rows", "options"),
    [(4, 2, None, {}), (4, 2, None, {"mp_policy": LOWER}), (8, 2, 2, {}), (2, 1, None, {})],
    ids=["", "lower", "replicas", "one"],
)
def test_weights_are_those_of_true_and_of_fsdp2(world, number, rows, options):
    for from_true, from_fsdp2 in run_ranks(trained, world, number, rows, options):
        assert from_true == 0
        assert from_fsdp2 <= (1e-3 if options else 1e-5)


def counted(model):
    return sum(c["gathered_bytes"] for c in state_of(model).context.counters())


def sent(rank, world, number):
    """Bytes of a forward, and of its backward, with a number and with True."""
    found = []
    for after in (number, True):
        model = apply(fully_shard, net(width=128), reshard_after_forward=after)
        loss_of(model, words(rank, 0)).backward()
        before = counted(model)
        loss = loss_of(model, words(rank, 1))
        inside = counted(model)
        held = all(isinstance(p, DTensor) for p in model.blocks.parameters())
        loss.backward()
        found.append((inside - before, counted(model) - inside))
        held = held and all(isinstance(p, DTensor) for p in model.parameters())
    bytes_of_all = sum(p.numel() * 4 for p in net(width=128).parameters())
    return found, bytes_of_all, held


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_backward_gathers_from_so_many_ranks(number):
    for (ours, usual), size, held in run_ranks(sent, 8, number):
        assert held
        assert ours[0] == usual[0], "forward gathers from everybody"
        assert math.isclose(usual[1], 7 / 8 * size, rel_tol=0.06), "shares are padded"
        shares = (number - 1) / number
        assert math.isclose(ours[1], shares * size, rel_tol=0.02)


def weights_change(rank, world, how):
    """Between a forward and the next forward."""
    outputs = []
    for after in (2, True):
        model = apply(fully_shard, net(), reshard_after_forward=after)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of(model, words(rank, 0)).backward()
        model(words(rank, 0))
        if how == "step":
            optimizer.step()
        elif how == "in place":
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
        else:
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        loss = loss_of(model, words(rank, 0))
        optimizer.zero_grad()
        loss.backward()
        outputs.append([loss.detach(), *whole([p.grad for p in model.parameters()])])
    return farthest(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "in place", "loaded"])
def test_no_forward_computes_with_what_was_kept(how):
    assert run_ranks(weights_change, 4, how) == [0] * 4


def turned_off(rank, world):
    model = apply(fully_shard, net(), reshard_after_forward=2)
    model.set_reshard_after_forward(True)
    loss_of(model, words(rank, 0)).backward()
    before = counted(model)
    loss_of(model, words(rank, 0)).backward()
    usual = apply(fully_shard, net(), reshard_after_forward=True)
    loss_of(usual, words(rank, 0)).backward()
    return counted(model) - before == counted(usual)


@pytest.mark.slow
def test_a_number_holds_until_a_script_says_otherwise():
    assert run_ranks(turned_off, 4) == [True] * 4


def refused(rank, world):
    for number in (3, 0, 8):
        with pytest.raises(ValueError, match=f"factor of 4, not {number}"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=number)
    bare = DeviceMesh.from_group(mesh_of(world).get_group(), "cpu")
    fully_shard(nn.Linear(4, 4), mesh=bare, reshard_after_forward=2)
    with pytest.warns(UserWarning, match="world size 1"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=1)


def test_numbers_that_make_no_sense():
    run_ranks(refused, 4)
