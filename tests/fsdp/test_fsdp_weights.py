"""Weights of micro-batches where parameters are sharded: gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fastsync import FastDDP, fully_shard
from tests.ddp.test_mean_weights import (
    EVEN,
    MISTAKES,
    SPARSE,
    THREE,
    distance,
    expected,
    give,
    loss_of,
    net,
    samples,
)
from tests.helpers.teams import run_ranks


def sharded(kind, **options):
    model = net()
    if kind == "zero3":
        return FastDDP(model, zero=3, **options)
    mesh = None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def read(model):
    return [p.grad.full_tensor() for p in model.parameters()]


def train(rank, world, splits, kind, form, local, options):
    model = sharded(kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for micro, count in enumerate(splits[rank]):
            if local and kind != "zero3":
                model.set_requires_gradient_sync(micro == len(splits[rank]) - 1)
            give(model, loss_of(model, rank, step, micro, count), count, form)
        found.append(read(model))
        optimizer.step()
    return found


@pytest.mark.slow(but=("even-local-plain", "zero-every-plain", "3-every-zero3"))
@pytest.mark.parametrize("kind", ["plain", "zero3"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "every"])
@pytest.mark.parametrize("splits", [EVEN, SPARSE, THREE], ids=["even", "zero", "3"])
def test_gradients_are_those_of_one_process(splits, local, kind):
    form = "mean" if splits is EVEN else "sum"
    wanted = expected(splits, 3)
    # A mean that is added to is rounded once more.
    bound = 2**-23 if local and kind != "zero3" else len(splits[0]) * 2**-23
    for steps in run_ranks(train, len(splits), splits, kind, form, local, {}):
        assert max(map(distance, steps, wanted)) <= bound


def test_replicas_and_shards_have_one_mean():
    splits = [[2, 3], [4, 0], [1, 1], [0, 6]]
    wanted = expected(splits, 3)
    for steps in run_ranks(train, 4, splits, "hsdp", "sum", True, {}):
        assert max(map(distance, steps, wanted)) <= 2**-22


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 2**-8), ("int8", 0.01)])
def test_wires_are_within_their_bounds(wire, bound):
    wanted = expected(EVEN, 3)
    for steps in run_ranks(train, 2, EVEN, "plain", "sum", True, {"wire": wire}):
        assert max(map(distance, steps, wanted)) <= bound


def mistaken(rank, world, kind):
    model = sharded("plain")
    for step in range(3):
        model.zero_grad()
        try:
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = loss_of(model, rank, step, micro, 2)
                weight = 0.0 if step == 1 and kind == "zero" else 2.0
                if step == 1 and rank == 1 and micro == 0:
                    weight = {"negative": -3, "nan": float("nan")}.get(kind, weight)
                if step != 1 or rank == 0 or not (kind == "none" or (kind == "missing" and micro)):
                    model.add_weight(weight)
                loss.backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}", step
    return "", -1


@pytest.mark.slow(but=("missing",))
@pytest.mark.parametrize("kind", ["zero", "negative", "nan", "missing", "none"])
def test_mistakes_are_errors_on_every_rank_that_name_the_ranks(kind):
    for found, step in run_ranks(mistaken, 2, kind):
        assert step == 1 and found.startswith("RankMismatchError"), found
        assert MISTAKES[kind] in found


def settings(rank, world):
    texts = []
    for change in (
        lambda model: model[0].set_gradient_divide_factor(4.0),
        lambda model: model[0].set_requires_gradient_sync(False),
    ):
        model = sharded("plain")
        change(model)
        model.add_weight(1)
        try:
            loss_of(model, rank, 0, 0, 2).backward()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_units_with_settings_of_their_own_are_an_error():
    for texts in run_ranks(settings, 2):
        assert all("without a divisor of their own" in text for text in texts), texts


def frozen(rank, world, most):
    """Train with weights, freeze all but what `most` names, and go on."""
    model, found = sharded("plain"), []
    for param in model.parameters():  # of inputs alone, without a weight
        param.requires_grad_(False)
    model(samples(rank, 9, 0, 2)[0].requires_grad_()).sum().backward()
    for step in range(3):
        for name, param in model.named_parameters():
            param.requires_grad_(step != 1 or name in most)
        x, y = samples(rank, step, 0, 2)
        model.zero_grad()
        model.add_weight(2)
        (model(x.requires_grad_()) * y).sum().backward()
        grads = [p.grad for p in model.parameters()]
        found.append([None if g is None else g.full_tensor() for g in grads])
    return found


@pytest.mark.parametrize("most", [(), ("0.weight",)])
def test_frozen_param_groups_have_no_part_in_the_mean(most):
    wanted = expected([[2], [2]], 3)
    for found in run_ranks(frozen, 2, most):
        assert [i for i, g in enumerate(found[1]) if g is not None] == [0] * len(most)
        for grads, all_grads in zip(found, wanted, strict=True):
            there = [i for i, g in enumerate(grads) if g is not None]
            if there:
                mine, right = ([all_of[i] for i in there] for all_of in (grads, all_grads))
                assert distance(mine, right) <= 2**-23


class Passing(nn.Module):
    """A model whose forward may leave out all parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, left_out):
        return x * 2 if left_out else self.layer(x)


def counted(rank, world):
    """Return a gradient after a micro-batch of weight 3, and after another that uses nothing."""
    model, found = Passing(), []
    fully_shard(model.layer)
    fully_shard(model)
    for weight, left_out in ((3, False), (5, True)):
        model.add_weight(weight)
        model(torch.ones(3, requires_grad=True), left_out).sum().backward()
        found.append(model.layer.weight.grad.full_tensor())
    return found


def test_a_micro_batch_that_uses_no_parameter_counts():
    for first, both in run_ranks(counted, 2):
        assert torch.allclose(first, torch.full((3, 3), 1 / 3))
        assert torch.allclose(both, first * (3 / 8))


def inner(rank, world):
    model = sharded("plain")
    loss_of(model, rank, 0, 0, 2).backward()
    try:
        model[0].add_weight(1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_only_the_root_takes_weights():
    assert all("is no root" in text for text in run_ranks(inner, 2))
