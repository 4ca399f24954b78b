"""Saving a model whose parameters lie in shared buffers, and state that the ranks share."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import optim

from fastsync import FastDDP
from fastsync.integrations import whole_state
from tests.helpers.teams import run_ranks
from tests.zero.zero_loops import STEPS, close, net, train


def stepped(rank, zero):
    module = net()
    model = FastDDP(module, zero=zero, find_unused_parameters=True)
    optimizer = optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, rank, range(STEPS))
    return module, model, optimizer


def save_on_rank_0(rank, world, zero):
    _, model, optimizer = stepped(rank, zero)
    found = None
    with whole_state(optimizer):
        if rank == 0:
            found = copy.deepcopy(optimizer.state_dict()["state"])
        dist.barrier()
    train(model, optimizer, rank, [STEPS])  # the state has come apart again
    assert optimizer.state_dict()["state"][0]["step"] == STEPS + 1
    return found


def test_one_rank_alone_may_ask_for_the_collected_state():
    (wanted, _), (found, _) = (run_ranks(save_on_rank_0, 2, zero) for zero in (0, 1))
    assert wanted.keys() == found.keys()
    for index, values in wanted.items():
        assert close([values["exp_avg"]], [found[index]["exp_avg"]])


def leave_by_an_error(rank, world):
    _, _, optimizer = stepped(rank, 1)
    try:
        with whole_state(optimizer):
            raise ZeroDivisionError
    except ZeroDivisionError:
        return "state_dict" in vars(optimizer)


def test_state_is_let_go_after_an_error():
    assert run_ranks(leave_by_an_error, 2) == [False, False]


def storages(rank, world, zero):
    module, _, _ = stepped(rank, zero)
    file = io.BytesIO()
    torch.save(module.line.state_dict(), file)
    full = [p.untyped_storage() for p in module.parameters() if p.numel()]
    return len({s.data_ptr() for s in full}), [s.nbytes() for s in full], len(file.getvalue())


@pytest.mark.slow("1")
@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_do_not_look_tied_and_save_no_more_than_themselves(zero):
    """Accelerate drops all but one of the parameters that share a storage."""
    (wanted, _), (found, _) = (run_ranks(storages, 2, stage) for stage in (0, zero))
    assert found[:2] == wanted[:2]
    assert found[2] <= wanted[2] + 64


def memory_outlives_the_model(rank, world):
    module, model, optimizer = stepped(rank, 1)
    weight = module.line.weight
    wanted = weight.detach().clone()
    del module, model, optimizer
    torch.zeros(1000)  # where freed memory might be used again
    return torch.equal(weight, wanted)


def test_a_parameter_may_be_kept_alone():
    assert run_ranks(memory_outlives_the_model, 2) == [True, True]
