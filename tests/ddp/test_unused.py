"""Parameters without gradient: on some ranks, on all, now and then, frozen and unfrozen."""

import os
import warnings

import pytest
import torch
from torch import nn

from fastsync import FastDDP
from fastsync.testing import RankError
from tests.helpers.teams import run_ranks


class Branches(nn.Module):
    """Four layers; a forward uses those it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, used):
        return x.sum() + sum(self.layers[i](x).sum() for i in used)


def backward(model, used, rank=0):
    x = torch.full((1, 3), float(rank + 1), requires_grad=True)
    model(x, used).backward()


def weights(model):
    return [layer.weight for layer in model.module.layers]


def values(model):
    return [None if w.grad is None else w.grad[0, 0].item() for w in weights(model)]


def alternate(rank, world, options):
    """Each rank's input is rank + 1, so its own gradient is that too."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branches(), **options)
    seen = []
    for used in ([[0, 1], [0, 2]], [[0, 2], [0, 1]], [[], [3]], [[0], [0]], [[], []]) * 2:
        model.zero_grad()
        backward(model, used[rank], rank)
        seen.append(values(model))
    return seen, model.sync_stats()


OPTIONS = (
    {},
    {"gradient_as_bucket_view": False},
    {"bucket_cap_mb": 1e-6},
    {"find_unused_parameters": True, "wire": "bf16"},
)


@pytest.mark.slow(but=("options0",))
@pytest.mark.parametrize("options", OPTIONS)
def test_every_pattern_of_use(options):
    rows = [[1.5, 0.5, 1.0, None], [1.5, 1.0, 0.5, None], [None] * 3 + [1.0], [1.5] + [None] * 3]
    rows.append([None] * 4)
    for seen, stats in run_ranks(alternate, 2, options):
        assert seen == rows * 2
        assert stats["steps"] == 10
        assert stats["collectives"] == 10 * len(stats["buckets"]), "and not one more"


def keep_old(rank, world, options):
    """Use layer 1 in the first step only; later gradients that no rank produced stay."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branches(), **options)
    one, other = weights(model)[:2]
    kept, changed = [], []
    for round in range(8):
        torch.manual_seed(10 * round + rank)
        model.zero_grad()
        model(torch.randn(1, 3), [0, 1]).backward()
        old = one.grad.clone(), other.grad.clone()
        model(torch.randn(1, 3), [0]).backward()
        model(torch.randn(1, 3), [2] if rank == 1 else [0]).backward()
        kept.append(torch.equal(other.grad, old[1]))
        changed.append(not torch.equal(one.grad, old[0]))
    return all(kept), all(changed)


@pytest.mark.slow(but=("options1",))
@pytest.mark.parametrize("options", OPTIONS)
def test_what_no_rank_used_keeps_its_bits(options):
    """Three ranks: thirds do not add up to what they came from."""
    assert run_ranks(keep_old, 3, options) == [(True, True)] * 3


def keep_old_rows(rank, world, used_by):
    """Sparse gradients that are there before a step in which `used_by` uses the table."""
    net = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "line": nn.Linear(2, 1)})
    net.forward = lambda look_up: net["line"](
        net["table"](torch.tensor([rank])) if look_up else torch.ones(1, 2)
    )
    model = FastDDP(net, find_unused_parameters=True)
    weight = net["table"].weight
    weight.grad = torch.sparse_coo_tensor([[rank + 1]], [[2.0, 4.0]], weight.shape)
    before = weight.grad.to_dense()
    model(rank in used_by).sum().backward()
    own = torch.zeros(4, 2)
    if rank in used_by:
        own[rank] = net["line"].weight[0].detach()
    return weight.grad.to_dense(), before, own


@pytest.mark.slow("used_by0")
@pytest.mark.parametrize("used_by", [(), (1,)])
def test_sparse_gradients_that_are_there_before(used_by):
    ranks = run_ranks(keep_old_rows, 2, used_by)
    average = sum(before + own for _, before, own in ranks) / 2
    for after, before, _ in ranks:
        assert torch.allclose(after, average if used_by else before)


def accumulate(rank, world):
    """A gradient that arrived under no_sync() counts as used, whatever the last backward uses."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branches())
    for _ in range(3):
        model.zero_grad()
        with model.no_sync():
            backward(model, [1] if rank == 0 else [2], rank)
        backward(model, [0], rank)
    return values(model)


def test_gradients_from_no_sync_count_as_used():
    assert run_ranks(accumulate, 2) == [[1.5, 0.5, 1.0, None]] * 2


def catch_warnings(rank, world, find):
    model = FastDDP(Branches(), find_unused_parameters=find)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            backward(model, [0, 1, 2] if rank == 0 else [0])
    return [str(w.message) for w in caught if "no gradient" in str(w.message)]


def test_one_warning_with_names_by_default():
    first, second = run_ranks(catch_warnings, 2, None)
    assert len(first) == len(second) == 1
    assert "rank 0: 2 parameters" in first[0]
    assert "layers.3.weight" in first[0]
    assert "layers.1.weight" not in first[0]
    assert "rank 1: 6 parameters" in second[0]
    assert "find_unused_parameters" in first[0]


def test_no_warning_where_it_was_announced():
    assert run_ranks(catch_warnings, 2, True) == [[], []]


def refuse(rank, world):
    model = FastDDP(Branches(), find_unused_parameters=False)
    backward(model, [0, 1, 2, 3])
    backward(model, [0, 1, 2])
    try:
        backward(model, [0, 1, 2, 3])
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_error_where_it_was_refused():
    for rank, text in enumerate(run_ranks(refuse, 2)):
        assert "Expected to have finished reduction in the prior iteration" in text
        assert "layers.3.weight" in text
        assert f"rank {rank}" in text
        assert "find_unused_parameters=True" in text


def freeze_and_thaw(rank, world, options):
    warnings.simplefilter("ignore")
    model = FastDDP(Branches(), **options)
    model.module.layers[3].requires_grad_(False)
    seen, planned = [], []
    for step in range(24):
        if step == 4:
            model.module.layers[0].requires_grad_(False)
        if step == 12:
            model.module.layers[0].requires_grad_(True)
        if step == 16:
            model.module.layers[3].requires_grad_(True)
        model.zero_grad()
        backward(model, [0, 1, 2, 3], rank)
        seen.append(values(model))
        planned.append(sum(len(b.params) for b in model._engine.plan.buckets))
    return seen, planned


@pytest.mark.slow(but=("options0",))
@pytest.mark.parametrize("options", [*OPTIONS[:3], {"find_unused_parameters": False}])
def test_freezing_and_thawing_on_all_ranks(options):
    for seen, planned in run_ranks(freeze_and_thaw, 2, options):
        for step, row in enumerate(seen):
            first = None if 4 <= step < 12 else 1.5
            assert row == [first, 1.5, 1.5, None if step < 16 else 1.5], f"step {step}"
        assert planned[11] < planned[3], "frozen parameters leave the plan in the end"
        assert planned[-1] == 8


def freeze_alone(rank, world):
    """Freeze a layer on one rank: it counts as zero there until that rank unfreezes it."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branches())
    seen = []
    for step in range(16):
        model.module.layers[1].requires_grad_(not (rank == 1 and step in range(3, 12)))
        if step == 6:  # a new plan, made while that rank has it frozen
            model.module.layers[3].requires_grad_(False)
        if step == 9:
            model.module.layers[3].requires_grad_(True)
        model.zero_grad()
        # Once unfrozen, only that rank uses it: it must not go unnoticed.
        backward(model, [0, 2, 3] if step >= 12 and rank == 0 else [0, 1, 2, 3], rank)
        seen.append(values(model)[1])
    return seen


def test_freezing_on_one_rank_alone():
    for seen in run_ranks(freeze_alone, 2):
        assert seen == [1.5] * 3 + [0.5] * 9 + [1.0] * 4


def freeze_everything(rank, world):
    warnings.simplefilter("ignore")
    model = FastDDP(Branches())
    for step in range(12):
        model.requires_grad_(step not in range(3, 9))
        model.zero_grad()
        backward(model, [0, 1, 2, 3], rank)
    return values(model), model.sync_stats()["steps"]


def test_a_model_that_is_frozen_for_a_while():
    results = run_ranks(freeze_everything, 2)
    assert results[0] == results[1]
    assert results[0][0] == [1.5] * 4


def thaw_alone(rank, world, options):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "2"
    warnings.simplefilter("ignore")
    model = FastDDP(Branches(), **options)
    model.module.layers[3].requires_grad_(False)
    for _ in range(14):
        backward(model, [0, 1, 2, 3], rank)
    assert sum(len(b.params) for b in model._engine.plan.buckets) == 6
    model.module.layers[3].requires_grad_(rank == 1)
    backward(model, [0, 1, 2, 3], rank)


@pytest.mark.slow
def test_thawing_on_one_rank_alone_is_an_error_there():
    """The other ranks wait in their collective until that rank's process ends."""
    with pytest.raises(RankError) as caught:
        run_ranks(thaw_alone, 2, {}, timeout=30)
    text = str(caught.value)
    assert "rank 1 waited 2 s for the others to train the same parameters (8 on this rank)" in text
    assert "ranks [0] did not come" in text
    assert "before the same forward" in text


def freeze_alone_without_flags(rank, world):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "2"
    model = FastDDP(Branches(), find_unused_parameters=False)
    backward(model, [0, 1, 2, 3])
    backward(model, [0, 1, 2, 3])
    model.module.layers[3].requires_grad_(rank == 0)
    backward(model, [0, 1, 2, 3])


@pytest.mark.slow
def test_freezing_alone_without_used_flags_is_an_error_there():
    with pytest.raises(RankError, match=r"rank 1 waited 2 s .* ranks \[0\] did not come"):
        run_ranks(freeze_alone_without_flags, 2, timeout=30)


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        return self.inner(x).square().sum()


def penalise(rank, world, everywhere):
    """autograd.grad() accumulates nothing, so it must neither synchronise nor complain."""
    model = FastDDP(Penalised(), find_unused_parameters=False)
    steps = []
    for _ in range(4):
        model.zero_grad()
        x = torch.full((1, 3), float(rank + 1), requires_grad=True)
        loss = model(x)
        if everywhere or rank == 0:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.autograd.grad(loss, model.module.inner.weight, retain_graph=True)
            loss = loss + (slope.square().sum() if everywhere else 0)
        loss.backward()
        steps.append(model.sync_stats()["steps"])
    return steps


@pytest.mark.slow("True")
@pytest.mark.parametrize("everywhere", [True, False])
def test_autograd_grad_is_left_alone(everywhere):
    assert run_ranks(penalise, 2, everywhere) == [[1, 2, 3, 4]] * 2


def backward_into_inputs(rank, world):
    """backward(inputs=...) synchronises where the inputs are parameters."""
    warnings.simplefilter("ignore")
    model = FastDDP(Branches())
    for _ in range(2):
        model.zero_grad()
        x = torch.full((1, 3), float(rank + 1), requires_grad=True)
        model(x, [0, 1]).backward(inputs=[weights(model)[0]])
    mine = model.sync_stats()["steps"]
    model(x, [0, 1]).backward(inputs=[x])
    return values(model), mine, model.sync_stats()["steps"]


def test_backward_with_inputs():
    assert run_ranks(backward_into_inputs, 2) == [([1.5, None, None, None], 2, 2)] * 2
