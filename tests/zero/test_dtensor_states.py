"""The state of optimizers over tensor parallel layers in stages 1 and 2, as scripts see it."""

import copy
import io
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fastsync import FastDDP, Zero
from tests.helpers.teams import run_ranks
from tests.zero import test_zero_dtensors
from tests.zero.test_zero_dtensors import (
    PLAN,
    Net,
    is_as_at_stage_0,
    local,
    samples,
    step,
    whole,
)

# Stage 0 loads settings, too.
made = partial(test_zero_dtensors.made, foreach=False)


def by_name(model, optimizer, state):
    """The state of each parameter by its name."""
    names = {id(param): name for name, param in model.module.named_parameters()}
    params = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return {params[number]: values for number, values in state["state"].items()}


def same(found, wanted):
    """Two states of the same training: values of the same kind and placement."""
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        assert values.keys() == wanted[name].keys(), name
        for key, value in values.items():
            other = wanted[name][key]
            where = f"{key} of {name}"
            assert type(value) is type(other) and value.shape == other.shape, where
            assert getattr(value, "placements", None) == getattr(other, "placements", None), where
            torch.testing.assert_close(local(value), local(other), rtol=1e-11, atol=0, msg=where)


def go_on(model, optimizer):
    step(model, optimizer, 5)
    return {name: whole(param).detach() for name, param in model.module.named_parameters()}


def trained(stage, **options):
    model, optimizer = made(stage, **options)
    for number in range(3):
        step(model, optimizer, number)
    return model, optimizer


def copied(state):
    """The state as a file returns it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dicts(rank, world, stage, other):
    """Save what each rank has, and load it into another optimizer of another stage."""
    model, optimizer = trained(stage)
    plain, right = trained(0)
    if rank < 2:  # the ranks of one replica alone
        state = optimizer.state_dict()
        same(by_name(model, optimizer, state), by_name(plain, right, right.state_dict()))
    dist.barrier()
    saved = copied(optimizer.state_dict()), copy.deepcopy(model.module.state_dict())
    again, its = made(other)
    again.module.load_state_dict(saved[1])
    its.load_state_dict(saved[0])
    same(by_name(again, its, its.state_dict()), by_name(plain, right, right.state_dict()))
    return go_on(plain, right), go_on(again, its)


@pytest.mark.slow(but=("2-0",))
@pytest.mark.parametrize(("stage", "other"), [(1, 2), (2, 0), (0, 1)])
def test_state_dicts_hold_dtensors_and_fit_any_stage(stage, other):
    for right, found in run_ranks(through_state_dicts, 4, stage, other):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)


def write(rank, world, path, stage):
    model, optimizer = trained(stage)
    state = {"optimizer": model.optimizer_state_dict(optimizer)}
    dcp.save({**state, "model": model.module.state_dict()}, checkpoint_id=path)
    torch.save(optimizer.state_dict(), f"{path}-{rank}")
    return go_on(model, optimizer)


def read(rank, world, path, stage, moved=False):
    model, optimizer = trained(stage) if moved else made(stage)
    state = {"optimizer": model.optimizer_state_dict(optimizer), "model": model.module.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.module.load_state_dict(state["model"])
    model.load_optimizer_state_dict(optimizer, state["optimizer"])
    return go_on(model, optimizer)


def read_whole(rank, world, path):
    """Load into plain layers on one rank."""
    model = FastDDP(Net(), zero=1)
    optimizer = optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    state = {"optimizer": model.optimizer_state_dict(optimizer), "model": model.module.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.module.load_state_dict(state["model"])
    model.load_optimizer_state_dict(optimizer, state["optimizer"])
    return {n: s["exp_avg"] for n, s in by_name(model, optimizer, optimizer.state_dict()).items()}


def read_torch(rank, world, path, stage):
    """The averages of each parameter, whole, as torch's function gives them."""
    model, optimizer = made(stage)
    optimizer.load_state_dict(torch.load(f"{path}-{rank}", weights_only=False))
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model.module, optimizer, options=options)
    return {name: values["exp_avg"] for name, values in state["state"].items()}


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_files_fit_any_stage_and_plain_layers(stage, tmp_path):
    path = str(tmp_path / "saved")
    (right, *_) = run_ranks(write, 4, path, stage)
    for other, moved in ((0, False), (1, False), (2, True)):
        for found in run_ranks(read, 4, path, other, moved):
            torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)
    (found,) = run_ranks(read_whole, 1, path)
    (wanted, *_) = run_ranks(read_torch, 4, path, stage)
    assert len(found) == len(wanted) == 8
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def through_torch(rank, world, stage, full):
    model, optimizer = trained(stage)
    options = StateDictOptions(full_state_dict=full)
    state = get_optimizer_state_dict(model.module, optimizer, options=options)
    again, its = made(stage)
    again.module.load_state_dict(model.module.state_dict())
    set_optimizer_state_dict(again.module, its, copy.deepcopy(state), options=options)
    found, wanted = (by_name(m, o, o.state_dict()) for m, o in ((again, its), (model, optimizer)))
    same(found, wanted)
    return go_on(model, optimizer), go_on(again, its)


@pytest.mark.slow(but=("2-False",))
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_functions_of_torch_save_and_load(stage, full):
    for right, found in run_ranks(through_torch, 4, stage, full):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def looked_at(rank, world, stage):
    """Read and write `optimizer.state` as scripts do."""
    model, optimizer = trained(stage)
    up, down, last = (model.module.get_submodule(name) for name in ("up", "down", "last"))
    state = optimizer.state
    values = [whole(state[p]["exp_avg"].clone()) for p in (up.weight, down.bias, last.weight)]
    assert all(isinstance(state[p]["exp_avg"], DTensor) for p in (up.weight, down.bias))
    state[up.weight]["exp_avg"].zero_()
    state[last.weight]["exp_avg"].mul_(0.5)
    state[down.weight]["exp_avg_sq"] = 2 * state[down.weight]["exp_avg_sq"].clone()
    state[up.bias] = {**state[up.bias], "step": torch.tensor(1.0)}
    del state[last.bias]
    assert last.bias not in state and len(state) == 7
    return values, go_on(model, optimizer)


@pytest.mark.slow("2")
@pytest.mark.parametrize("stage", [1, 2])
def test_states_are_read_and_written_as_at_stage_0(stage):
    is_as_at_stage_0(looked_at, stage)


def of_one_process(rank, world, stage):
    """Load the state of plain layers, and look at each value whole."""
    net = Net()
    plain = optim.AdamW(net.parameters(), 0.01, amsgrad=True)
    for number in range(2):
        plain.zero_grad()
        net(samples(number, 0)).square().mean().backward()
        plain.step()
    model, optimizer = trained(stage)
    optimizer.load_state_dict(plain.state_dict())
    found = by_name(model, optimizer, optimizer.state_dict())
    assert all(isinstance(found[f"{name}.weight"]["exp_avg"], DTensor) for name in PLAN)
    go_on(model, optimizer)
    names = dict(net.named_parameters())
    return [
        ({key: whole(value) for key, value in found[name].items()}, plain.state[param])
        for name, param in names.items()
    ]


@pytest.mark.slow("1")
@pytest.mark.parametrize("stage", [1, 2])
def test_whole_tensors_are_loaded_too(stage):
    for pairs in run_ranks(of_one_process, 4, stage):
        for found, wanted in pairs:
            torch.testing.assert_close(found, dict(wanted), rtol=0, atol=0)


class Own(nn.Module):
    """Parameters over a mesh of all ranks, of which each rank uses its own part."""

    def __init__(self, mesh, placed):
        super().__init__()
        self.weights = nn.ParameterList(
            distribute_tensor(torch.arange(1.0, 1 + math.prod(sizes)).view(sizes), mesh, places)
            for sizes, places in placed
        )

    def forward(self, x):
        return sum((x * weight.to_local()).square().sum() for weight in self.weights)


def over_all_ranks(rank, world, kind, placed, stage, path):
    """Train, save, and load into an optimizer of stage 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for each in (stage, 0):
        net = Own(mesh, placed)
        model = FastDDP(net, process_group=mesh.get_group("dp"), zero=each)
        optimizer = kind(net.parameters(), 0.01)
        for number in range(2 if each else 0):
            optimizer.zero_grad()
            model(torch.tensor(1.0 + rank // 2 + number)).backward()
            optimizer.step()
        state = {"optimizer": model.optimizer_state_dict(optimizer)}
        (dcp.save if each else dcp.load)(state, checkpoint_id=path)
        if not each:
            model.load_optimizer_state_dict(optimizer, state["optimizer"])
        found.append(by_name(model, optimizer, optimizer.state_dict()))
    same(found[1], found[0])
    values = [v for its in found[0].values() for name, v in its.items() if name != "step"]
    assert values and all(isinstance(value, DTensor) for value in values)


CUT, WHOLE = [Replicate(), Shard(0)], [Replicate(), Replicate()]
MESHES = {
    "cut": (optim.AdamW, [((6, 4), CUT)]),
    "one row": (optim.AdamW, [((1, 4), CUT)]),  # of which two ranks have nothing
    "whole": (optim.AdamW, [((6, 4), WHOLE)]),
    "whole matrices": (optim.Adafactor, [((6, 4), WHOLE)]),
    "unequal parts": (optim.AdamW, [((33,), CUT), ((64,), WHOLE)]),
}


@pytest.mark.slow(but=("unequal parts-1", "one row-2"))
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_may_contain_the_replicas(case, stage, tmp_path):
    run_ranks(over_all_ranks, 4, *MESHES[case], stage, str(tmp_path / "saved"))


def narrow(rank, world, path, options):
    """A training with masters, and another one that goes on from its files."""
    net = Net().to(options["dtype"])
    dtype, zero = net.first.weight.dtype, options["zero"]
    model, optimizer = made(1, net=net, **zero)

    def steps(model, optimizer, numbers):
        for number in numbers:
            draw = torch.Generator().manual_seed(10 * number + rank // 2)
            model.zero_grad()
            model(torch.randn(6, 4, generator=draw).to(dtype)).float().square().mean().backward()
            optimizer.step()

    steps(model, optimizer, range(4))
    state = {"optimizer": model.optimizer_state_dict(optimizer), "model": model.module.state_dict()}
    dcp.save(state, checkpoint_id=path)
    again, its = made(1, net=Net().to(dtype), **zero)
    state = {"optimizer": again.optimizer_state_dict(its), "model": again.module.state_dict()}
    dcp.load(state, checkpoint_id=path)
    again.module.load_state_dict(state["model"])
    again.load_optimizer_state_dict(its, state["optimizer"])
    masters = by_name(model, optimizer, optimizer.state_dict())["up.weight"]["master"]
    assert isinstance(masters, DTensor) and masters.dtype is torch.float32
    loaded = copied(optimizer.state_dict()), model.module.state_dict()
    third, own = made(2, net=Net().to(dtype), **zero)
    third.module.load_state_dict(loaded[1])
    third.load_optimizer_state_dict(own, loaded[0])
    found = []
    for each, optimizer_of_it in ((model, optimizer), (again, its), (third, own)):
        steps(each, optimizer_of_it, range(4, 8))
        found.append([whole(param).detach() for param in each.module.parameters()])
    return found


@pytest.mark.slow("int8")
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16, "zero": {"master_weights": True}},
        {"dtype": torch.float32, "zero": {"parameter_wire": "int8"}},
    ],
    ids=["masters", "int8"],
)
def test_masters_are_kept_of_what_each_rank_has(options, tmp_path):
    for right, again, third in run_ranks(narrow, 4, str(tmp_path / "saved"), options):
        torch.testing.assert_close(again, right, rtol=0, atol=0)
        torch.testing.assert_close(third, right, rtol=0, atol=0)


def refused(rank, world, make, zero):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(nn.Linear(4, 4, bias=False), mesh["tp"], ColwiseParallel())
    model = FastDDP(net, process_group=mesh.get_group("dp"), zero=zero)
    before = net.weight.to_local().detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer = make(net)
    texts = []
    for call in (optimizer.step, lambda: model.optimizer_state_dict(optimizer)):
        with pytest.raises(ValueError) as error:
            call()
        texts.append(str(error.value))
    assert torch.equal(before, net.weight.to_local())
    return texts


def muon(net):
    return optim.Muon(net.parameters(), 0.01)


def adamw(net):
    return optim.AdamW(net.parameters(), 0.01)


REFUSED = {
    "muon": (muon, 1, "an update of torch.optim.Muon depends on all parts; use zero=0"),
    "by tensor": (
        adamw,
        Zero(2, shard_by="tensor"),
        "update of torch.optim.adamw.AdamW depends",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_step_otherwise_is_refused_on_all_ranks(case):
    make, zero, wanted = REFUSED[case]
    for texts in run_ranks(refused, 4, make, zero):
        assert all(wanted in text for text in texts), texts
