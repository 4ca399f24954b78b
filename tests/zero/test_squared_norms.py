"""Squares of averages that owners sum up on the way: those of the averages, at any time."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from fastsync import FastDDP
from fastsync.config.arguments import grouped
from fastsync.reducer import core
from fastsync.zero.gradient_proxies import ShardedGradient
from tests.helpers.teams import run_ranks

WIDE = 601  # one weight has several blocks of squares on each rank, and one that is not whole


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3, 7, generator=generator)


def backward(model, rank, step, parts=1):
    for part in range(parts):
        model(batch(rank, 10 * step + part)).square().mean().backward()


def asked(model):
    """Return what the sums say."""
    shard_group = model.reducer.holders().shard_group
    units = [] if shard_group is None else [unit.core for unit in shard_group.units]
    return model._engine.core.squares(list(model.parameters()), units)


def known(model):
    """Return what the sums of this rank's shares say, and what a read does."""
    squares = asked(model)
    params = list(model.parameters())
    grads = [param.grad for param in params if isinstance(param.grad, ShardedGradient)]
    read = sum(core.square_sums([grad.share.piece for grad in grads]))
    return None if squares is None else squares.owned, read


def summed(rank, world, options, dtype, parts):
    model = FastDDP(net().to(dtype), **grouped(options))
    if dtype is torch.float64:
        model.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    optimizer = optim.SGD(model.parameters(), 0.01)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, rank, step, parts)
        found.append(known(model))
        model.clip_grad_norm_(1e9)
        optimizer.step()
    return found


@pytest.mark.slow(
    but=(
        "1-{'zero': 1}-2",
        "2-{'zero': 2, 'shared_memory': False}-3",
        "2-{'zero': 1, 'wire': 'int8'}-3",
        "1-{'zero': 2, 'wire': 'int4', 'bucket_cap_mb': 0.5}-2",
    )
)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1},
        {"zero": 2, "shared_memory": False},
        {"zero": 1, "wire": "int8"},
        {"zero": 2, "wire": "int4", "bucket_cap_mb": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 2])
def test_sums_are_those_of_a_read_to_the_bit(world, options, parts):
    for found in run_ranks(summed, world, options, torch.float32, parts):
        assert [squares is None for squares, _ in found] == [False, True, False, False]
        assert found[0] == (0.0, 0.0), "the first step is made with whole gradients"
        assert all(squares == read > 0.0 for squares, read in found[2:])


def test_sums_of_doubles():
    for found in run_ranks(summed, 2, {"zero": 1}, torch.float64, 1):
        assert found[3][0] == found[3][1] > 0


def scale_all(params):
    for param in params:
        param.grad.mul_(0.5)


def scale_one(params):
    params[2].grad.data.div_(4.0)


def add_to_one(params):
    params[2].grad.add_(torch.ones_like(params[2]))


def write_an_element(params):
    params[0].grad[0, 0] = 7.0


def drop_one(params):
    params[1].grad = None


def replace_one(params):
    params[2].grad = torch.full_like(params[2], 0.01)


def zero_one(params):
    params[2].grad.zero_()


def clip_values(params):
    nn.utils.clip_grad_value_(params, 1e-4)


def unscale(params):
    grads = [param.grad for param in params]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(0.125))


CHANGES = (
    *(scale_all, scale_one, add_to_one, write_an_element, drop_one),
    *(replace_one, zero_one, clip_values, unscale),
)


def exact_norm(model):
    grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
    return sum(grad.square().sum().item() for grad in grads) ** 0.5


def changed(rank, world, options):
    """The norms that the model returns after each change, and those of a model without zero."""
    models = [FastDDP(net(), **grouped(options)), FastDDP(net())]
    optimizers = [optim.SGD(model.parameters(), 0.01) for model in models]
    norms = []
    for step, change in enumerate((None, None, *CHANGES)):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, rank, step)
            if change is not None:
                change(list(model.parameters()))
        ours = [models[0].clip_grad_norm_(1e9).item()]
        ours.append(models[0].clip_grad_norm_(ours[0] / 2).item())  # and once more
        ours.append(models[0].clip_grad_norm_(1e9).item())
        exact = exact_norm(models[1])
        norms.append((ours, [exact, exact, exact / 2]))
        for param in models[1].parameters():
            if param.grad is not None:
                param.grad.div_(2)
        for optimizer in optimizers:
            optimizer.step()
    return norms


@pytest.mark.slow("{'zero': 2}", "{}")
@pytest.mark.parametrize(
    "options", [{"zero": 1}, {"zero": 2}, {}, {"shared_memory": False}], ids=str
)
def test_changes_in_between_count(options):
    for norms in run_ranks(changed, 2, options):
        for ours, exact in norms:
            assert ours == pytest.approx(exact, rel=1e-4)


def some_unused(rank, world):
    """A gradient that no rank gives this time stays as it is, and counts."""
    model = FastDDP(net(), zero=2)
    twin = copy.deepcopy(model.module)
    optimizer = optim.SGD(model.parameters(), 0.0)
    found = []
    for step in range(4):
        if step < 2:
            optimizer.zero_grad()
            twin.zero_grad()
        for part in (model, twin):
            inputs = torch.cat([batch(r, step) for r in range(world)])
            mine = batch(rank, step) if part is model else inputs
            used = part(mine) if step < 2 else part_of(part, mine, model)
            used.square().mean().backward()
        optimizer.step() if step < 1 else None
        wanted = nn.utils.clip_grad_norm_(twin.parameters(), 1e9).item()
        found.append((model.clip_grad_norm_(1e9).item(), wanted))
    return found


def part_of(part, inputs, model):
    """Without the widest layer; through the wrapper where it is ours."""
    if part is not model:
        return part[3](part[1](part[0](inputs)))
    layers, part.module = part.module, nn.Sequential(part.module[0], part.module[1], part.module[3])
    try:
        return part(inputs)
    finally:
        part.module = layers


def test_gradients_that_a_backward_does_not_reach():
    for found in run_ranks(some_unused, 2):
        for ours, wanted in found:
            assert ours == pytest.approx(wanted, rel=1e-3)


def clip_alone(rank, world):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "2"
    model = FastDDP(net(), zero=1)
    optimizer = optim.SGD(model.parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    text = ""
    if rank == 1:
        try:
            model.clip_grad_norm_(1.0)
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    return text


def test_a_rank_that_clips_alone_gets_an_error():
    nobody, text = run_ranks(clip_alone, 2)
    assert nobody == "" and "for the others to ask for the norm of all gradients" in text
    assert "rank 0 did not come" in text and "on every rank, or on none" in text


def two_models(rank, world):
    """Each model's gradients count for themselves, in whatever order they are clipped."""
    models = [FastDDP(net(), zero=1) for _ in range(2)]
    optimizers = [optim.SGD(model.parameters(), 0.0) for model in models]
    norms = []
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, rank, step if model is models[0] else 0)
            optimizer.step()
            if step:
                backward(model, rank, step if model is models[0] else 0)
        norms = [model.clip_grad_norm_(1e9).item() for model in reversed(models)]
    return norms


def test_two_models():
    first, second = run_ranks(two_models, 2)
    assert first == second and first[0] != first[1]


def in_buckets(rank, world, dtype, options):
    """Return the squares of whole gradients on each rank: after a backward, and after a change."""
    model = FastDDP(net().to(dtype), **grouped(options))
    model.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    heard, exact = [], []
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step)
        heard.append(asked(model).common)
        exact.append(exact_norm(model) ** 2)
        with torch.no_grad():
            for param in model.parameters():
                param.grad.add_(0)  # another version, the same values: the bucket is read
        heard.append(asked(model).common)
        for param in model.parameters():
            param.grad.data.mul_(2)  # no other version
        heard.append(asked(model).common / 4)
    return heard, exact


@pytest.mark.slow(
    but=(
        "{}-dtype2-3",
        "{'shared_memory': False}-dtype0-2",
        "{'bucket_cap_mb': 0.1}-dtype1-3",
    )
)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.1}, {"shared_memory": False}], ids=str)
def test_buckets_say_what_a_read_of_them_does_to_the_bit(world, dtype, options):
    results = run_ranks(in_buckets, world, dtype, options)
    for heard, exact in results:
        assert heard[0::3] == heard[1::3] == heard[2::3]
        assert heard[0::3] == pytest.approx(exact, rel=1e-9)
    assert all(heard == results[0][0] for heard, _ in results)


def some_missed(rank, world):
    """Ranks that use different parameters hear the same bits."""
    model = FastDDP(net(), find_unused_parameters=True)
    heard = []
    for step in range(4):
        model.zero_grad()
        if step > 1 and rank == 1:
            part_of(model, batch(rank, step), model).square().mean().backward()
        else:
            backward(model, rank, step)
        heard.append(asked(model).common)
    return heard


def test_ranks_that_use_other_parameters_hear_the_same():
    first, *others = run_ranks(some_missed, 3)
    assert all(other == first for other in others) and min(first) > 0


def held_on_one_rank(rank, world):
    """Gradients that one rank has moved elsewhere are added up in another order there."""
    model = FastDDP(net().double())
    model.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    scaled = []
    for step in range(8):
        model.zero_grad()
        backward(model, rank, step)
        for param in model.parameters():
            param.grad = param.grad.clone() if rank == 0 else param.grad
        model.clip_grad_norm_(0.01)
        scaled += [param.grad.clone() for param in model.parameters()]
    return scaled


def test_ranks_that_add_up_in_other_orders_scale_alike():
    first, second = run_ranks(held_on_one_rank, 2)
    assert all(map(torch.equal, first, second))
