"""Checkpoints of sharded optimizers: unused parameters, coded gradients, other models."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fastsync import FastDDP, Zero
from fastsync.testing import RankError
from fastsync.zero.dcp_chunks import Chunks
from tests.helpers.teams import run_ranks
from tests.zero.zero_checkpoints import STAGES, load, made, net, same, save, train

CLASSES = {
    "plain sgd": lambda p: optim.SGD(p, 0.1),
    "adam": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "fused adamw": lambda p: optim.AdamW(p, fused=True),
    "adamax": lambda p: optim.Adamax(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p),
    "asgd": lambda p: optim.ASGD(p),
}


def every_class(rank, world, stage, folder, step):
    """Whole states, after one step and saving, or after loading."""
    states = []
    for name, make in CLASSES.items():
        module = net()
        model = FastDDP(module, zero=stage)
        optimizer = make([p for p in module.parameters() if p.requires_grad])
        if step:
            train(model, optimizer, [0], rank, world)
            save(model, optimizer, f"{folder}/{name}")
        else:
            optimizer.param_groups[0]["maximize"] = True
            load(model, optimizer, f"{folder}/{name}")
        states.append(copy.deepcopy(optimizer.state_dict()))
    return states


@pytest.mark.slow
def test_every_elementwise_optimizer_of_torch(tmp_path):
    wanted = run_ranks(every_class, 2, 1, str(tmp_path), True)[0]
    assert [len(state["state"]) for state in wanted] == [0] + [7] * (len(CLASSES) - 1)
    for states in run_ranks(every_class, 3, 2, str(tmp_path), False):
        assert all(same(a, b) for a, b in zip(states, wanted, strict=True))


class Partly(nn.Module):
    """Module in which one parameter has no gradient in the first steps, and one may be sparse."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)
        self.line = nn.Linear(4, 9)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x, all_of_it=False):
        y = self.line(self.words(x)).square().mean()
        return y + self.unused.sum() if all_of_it else y


def steps_of_partly(model, optimizers, steps, rank):
    for step in steps:
        words = torch.tensor([(step + rank) % 9, 3])
        model(words, step > 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def partly(rank, world, stage, path):
    """All steps, and the same in two halves. One parameter is not in the checkpoint."""
    trainings = []
    for halves in (False, True):
        torch.manual_seed(1)
        module = Partly()
        for steps in (range(2), range(2, 5)):
            if halves or not steps.start:
                model = FastDDP(module, zero=stage, find_unused_parameters=True)
                dense = [p for p in module.parameters() if p is not module.words.weight]
                optimizers = [optim.SparseAdam([module.words.weight]), optim.AdamW(dense, 0.05)]
            if halves and steps.start:
                state = {
                    str(i): model.optimizer_state_dict(each) for i, each in enumerate(optimizers)
                }
                dcp.load(state, checkpoint_id=path, planner=PARTIAL)
                for i, each in enumerate(optimizers):
                    model.load_optimizer_state_dict(each, state[str(i)])
            steps_of_partly(model, optimizers, steps, rank)
            if not steps.start:
                assert 0 not in optimizers[1].state_dict()["state"], "nothing was made for it"
            if halves and not steps.start:
                state = {
                    str(i): model.optimizer_state_dict(each) for i, each in enumerate(optimizers)
                }
                dcp.save(state, checkpoint_id=path)
        trainings.append(([p.detach() for p in module.parameters()], optimizers[1].state_dict()))
    return trainings


PARTIAL = dcp.DefaultLoadPlanner(allow_partial_load=True)


@pytest.mark.slow("0", "2")
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_never_had_a_gradient_and_sparse_ones(stage, tmp_path):
    for wanted, found in run_ranks(partly, 2, stage, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
        same(found[1], wanted[1])
        assert sorted(float(s["step"]) for s in wanted[1]["state"].values()) == [2, 5, 5]


def beside_the_wire(rank, world, wire, path):
    """All steps, and the same in two halves, with what coding carries."""
    trainings = []
    for halves in (False, True):
        module, model, optimizer = made("adamw", 1, wire=wire)
        train(model, optimizer, range(3), rank, world)
        if halves:
            state = {
                "model": module.state_dict(),
                "optimizer": model.optimizer_state_dict(optimizer),
                f"wire {rank}": model.sync_state_dict(),
            }
            saved = copy.deepcopy(state[f"wire {rank}"])
            dcp.save({name: state[name] for name in ("model", "optimizer")}, checkpoint_id=path)
            module, model, optimizer = made("adamw", 2, wire=wire)
            state = {
                "model": module.state_dict(),
                "optimizer": model.optimizer_state_dict(optimizer),
            }
            dcp.load(state, checkpoint_id=path)
            module.load_state_dict(state["model"])
            model.load_optimizer_state_dict(optimizer, state["optimizer"])
            model.load_sync_state_dict(saved)
        train(model, optimizer, range(3, 6), rank, world)
        kept = model.sync_state_dict()
        carried = list(kept["residuals"].values())
        trainings.append(([p.detach() for p in module.parameters()], carried))
    return trainings


@pytest.mark.slow("topk")
@pytest.mark.parametrize("wire", ["int4", "topk"])
def test_beside_error_feedback(wire, tmp_path):
    for wanted, found in run_ranks(beside_the_wire, 2, wire, str(tmp_path)):
        assert any(each.any() for each in wanted[1])
        for there, here in zip(wanted, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def stepped(rank, world):
    _, model, optimizer = made("adamw", 1)
    train(model, optimizer, [0], rank, world)
    return model, optimizer, model.optimizer_state_dict(optimizer)


def save_alone(rank, world):
    os.environ["FASTSYNC_AGREE_TIMEOUT"] = "2"
    _, model, optimizer = made("adamw", 1)
    if rank == 0:
        with pytest.raises(RuntimeError) as error:
            model.optimizer_state_dict(optimizer)
    dist.barrier()
    return str(error.value) if rank == 0 else ""


@pytest.mark.slow
def test_a_save_on_one_rank_alone_is_an_error():
    text, _ = run_ranks(save_alone, 2)
    assert "waited 2 s for model.optimizer_state_dict()" in text
    assert "ranks [1] did not come. Call it on every rank" in text


def foreign_parameter(rank, world, path):
    _, model, _ = made("adamw", 1)
    params = (nn.Linear(3, 2) if rank == 1 else model).parameters()
    model.optimizer_state_dict(optim.SGD(params, 0.1))


def load_nothing(rank, world, path):
    _, model, optimizer = made("adamw", 1)
    model.load_optimizer_state_dict(optimizer, model.optimizer_state_dict(optimizer))


def load_weights(rank, world, path):
    model, optimizer, _ = stepped(rank, world)
    model.load_optimizer_state_dict(optimizer, model.module.state_dict())


def load_fewer_parameters(rank, world, path):
    model, optimizer, state = stepped(rank, world)
    state["param_groups"][0]["params"].remove("scale")
    model.load_optimizer_state_dict(optimizer, state)


def load_more_parameters(rank, world, path):
    model, optimizer, state = stepped(rank, world)
    state["param_groups"][1]["params"].append("more.weight")
    model.load_optimizer_state_dict(optimizer, state)


def load_other_groups(rank, world, path):
    model, optimizer, state = stepped(rank, world)
    first, second = state["param_groups"]
    second["params"].append(first["params"].pop())
    model.load_optimizer_state_dict(optimizer, state)


def load_wrong_tensors(rank, world, path):
    """Tensors that are neither whole nor what this rank owns."""
    model, optimizer, _ = stepped(rank, world)
    state = get_optimizer_state_dict(model, optimizer)
    for values in state["state"].values():
        values.update({name: v[:-1] for name, v in values.items() if getattr(v, "ndim", 0) > 0})
    model.load_optimizer_state_dict(optimizer, state)


def load_other_elements(rank, world, path):
    model, optimizer, state = stepped(rank, world)
    for values in state["state"].values():
        chunks = [(name, value) for name, value in values.items() if isinstance(value, Chunks)]
        values.update({name: Chunks(v, v.part[1:], v.begin + 1) for name, v in chunks})
    model.load_optimizer_state_dict(optimizer, state)


class Nested(optim.SGD):
    """Optimizer that keeps tensors in a dictionary, where they cannot be assigned to elements."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["more"] = {"sum": torch.zeros_like(param)}


def save_nested_state(rank, world, path):
    model = FastDDP(net(), zero=Zero(1, shard_by="element"))
    optimizer = Nested(model.parameters(), 0.1)
    train(model, optimizer, [0], rank, world)
    model.optimizer_state_dict(optimizer)


FAULTS = {
    save_nested_state: r"'more' in the state of '.*' is neither a number nor .*; use zero=Zero",
    foreign_parameter: r"every rank; rank 1: expects an optimizer of this model.*shape \(2, 3\)",
    load_nothing: r"call torch.distributed.checkpoint.load\(\) before",
    load_weights: r"expects what model.optimizer_state_dict\(\) returned",
    load_fewer_parameters: r"has no 'scale', but the optimizer has; load the checkpoint into",
    load_more_parameters: r"has 'more.weight', but the optimizer has not; load the checkpoi",
    load_other_groups: r"its parameters in other groups; load the checkpoint into",
    load_wrong_tensors: r"'exp_avg' in the state of '.*' is not of the elements that this",
    load_other_elements: r"is not of the elements that this rank owns; pass what model.opt",
}


@pytest.mark.slow(but=("load_fewer_parameters",))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_rank_learns_what_is_wrong(fault, tmp_path):
    with pytest.raises(RankError, match=FAULTS[fault]) as error:
        run_ranks(fault, 2, str(tmp_path / "saved"))
    assert all(f"rank {rank} raised" in str(error.value) for rank in range(2))
