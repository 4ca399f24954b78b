"""Engine, the Python half, and what the C++ half refuses."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync._build import extension
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.reducer.engine import Engine, NamedParam
from tests.helpers.teams import run_ranks


def params_of(count=3):
    return [NamedParam(f"p{i}", nn.Parameter(torch.full((4,), float(i)))) for i in range(count)]


def drive(rank, world, views):
    """The engine without a module: any backward between before_ and after_forward is averaged."""
    params = params_of()
    policy = SyncPolicy(views=views)
    engine = Engine(params, dist.group.WORLD, BucketPolicy((1,)), policy)
    plans = []
    for _ in range(3):
        plans.append(engine.before_forward())
        for p in params:
            p.tensor.grad = None
        loss = sum((p.tensor * (rank + 1)).sum() for p in params)
        engine.after_forward([loss])
        loss.backward()
    return plans, [p.tensor.grad.tolist() for p in params], engine.core.stats()


@pytest.mark.slow("True")
@pytest.mark.parametrize("views", [True, False])
def test_a_loss_without_a_module(views):
    for plans, grads, stats in run_ranks(drive, 2, views):
        assert plans == [False, True, False]
        assert grads == [[1.5] * 4] * 3
        assert (stats["steps"], stats["plans"], stats["collectives"]) == (3, 2, 9)
        assert stats["bytes"] == 9 * 32 * 4
        assert stats["exposed_seconds"] > 0


def switch_group(rank, world):
    params = params_of(1)
    engine = Engine(params, dist.group.WORLD, BucketPolicy((1,)), SyncPolicy())
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    values = []
    for group in (None, groups[rank // 2], dist.group.WORLD):
        if group is not None:
            engine.use_group(group)
        for _ in range(2):
            engine.before_forward()
            params[0].tensor.grad = None
            loss = (params[0].tensor * rank).sum()
            engine.after_forward([loss])
            loss.backward()
        values.append(params[0].tensor.grad[0].item())
    return values


def test_another_group():
    assert run_ranks(switch_group, 4) == [[1.5, 0.5, 1.5]] * 2 + [[1.5, 2.5, 1.5]] * 2


def errors_of_plans(rank, world):
    core = extension.load()
    params = params_of(2)
    engine = Engine(params, dist.group.WORLD, BucketPolicy((1,)), SyncPolicy())

    def spec(slots, sparse=False):
        return core.BucketSpec(slots, 64, 48, torch.float32, True, sparse)

    wrong = {
        "lacks": [spec([(0, 0)])],
        "twice": [spec([(0, 0), (1, 16)]), spec([(0, 0)])],
        "at least one": [spec([])],
        "one parameter": [spec([(0, 0), (1, 16)], sparse=True)],
    }
    texts = {}
    for label, specs in wrong.items():
        try:
            engine.core.set_plan(specs)
        except ValueError as error:
            texts[label] = str(error)
    return texts


def test_plans_that_make_no_sense():
    for texts in run_ranks(errors_of_plans, 1):
        assert len(texts) == 4
        for label, text in texts.items():
            assert label in text


def late_thaw(rank, world):
    """Unfreeze a parameter between forward and backward, which is too late,
    and an error says so.
    """
    warnings.simplefilter("ignore")
    params = params_of(2)
    params[1].tensor.requires_grad_(False)
    engine = Engine(params, dist.group.WORLD, BucketPolicy((1,)), SyncPolicy())
    engine.before_forward()
    params[1].tensor.requires_grad_(True)
    loss = (params[0].tensor + params[1].tensor).sum()
    engine.after_forward([loss])
    loss.backward()
    return params[1].tensor.grad.tolist(), params[0].tensor.grad.tolist()


def test_a_parameter_thawed_after_the_forward_began():
    for late, planned in run_ranks(late_thaw, 2):
        assert late == planned == [1.0] * 4


def name_no_group(rank, world):
    tensors = [p.tensor for p in params_of(1)]
    try:
        extension.load().Reducer(tensors, ["p"], "no such group", False, False, False)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_group_that_is_not_there():
    assert "no such group" in run_ranks(name_no_group, 1)[0]


def forget_the_engine(rank, world):
    """Hooks hold the reducer weakly: training goes on, locally, when it is gone."""
    params = params_of(1)
    engine = Engine(params, dist.group.WORLD, BucketPolicy((1,)), SyncPolicy())
    loss = (params[0].tensor * (rank + 1)).sum()
    engine.after_forward([loss])
    del engine
    loss.backward()
    return params[0].tensor.grad.tolist()


def test_an_engine_that_is_gone():
    assert run_ranks(forget_the_engine, 2) == [[1.0] * 4, [2.0] * 4]
