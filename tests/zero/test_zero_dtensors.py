"""Tensor parallel layers in stages 1 and 2: ranks share what each has of a DTensor."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fastsync import FastDDP, Zero
from fastsync.zero.optimizer_state import held_state
from tests.helpers.teams import run_ranks

STEPS = 12
PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "last": ColwiseParallel(output_layouts=Replicate()),
}
OPTIMIZERS = {
    "adamw": lambda p, loops: optim.AdamW(p, 0.01, amsgrad=True, foreach=loops),
    "sgd": lambda p, loops: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, foreach=loops),
    "nadam": lambda p, loops: optim.NAdam(p, 0.01, foreach=loops),
}


class Net(nn.Module):
    """Layers of which all but the first are cut, the last one into unequal parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.last = nn.Linear(4, 5)
        self.double()

    def forward(self, x):
        return self.last(self.down(self.up(self.first(x)).tanh()))


def samples(step, replica, dtype=torch.float64):
    draw = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(6, 4, generator=draw, dtype=dtype)


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(stage, kind="adamw", net=None, cuts=None, foreach=None, **options):
    """A model over two replicas of two parts each, wrapped, and its optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net() if net is None else net
    if cuts is not None:
        net = net.requires_grad_(False)
        for name in cuts:
            net.get_submodule(name).requires_grad_(True)
    parallelize_module(net, mesh["tp"], PLAN)
    zero = stage if stage == 0 else Zero(stage, **options)
    model = FastDDP(net, process_group=mesh.get_group("dp"), bucket_cap_mb=2e-4, zero=zero)
    # Torch has no foreach of DTensors beside other tensors.
    params = [param for param in net.parameters() if param.requires_grad]
    return model, OPTIMIZERS[kind](params, stage > 0 if foreach is None else foreach)


def step(model, optimizer, number, clips=None):
    """A step of two micro-batches."""
    replica = dist.get_rank() // 2
    model.zero_grad(set_to_none=number % 2 == 0)
    with model.no_sync():
        model(samples(number, replica)).square().mean().backward()
    model(samples(number + 100, replica)).square().mean().backward()
    if clips is not None:
        model.clip_grad_norm_(*clips)
    optimizer.step()


def freeze(net, number):
    """Freeze a layer for a while."""
    net.down.requires_grad_(not 4 <= number < 8)


def train(rank, world, stage, kind, clips):
    model, optimizer = made(stage, kind)
    for number in range(STEPS):
        freeze(model.module, number)
        step(model, optimizer, number, clips)
    kinds = {name: type(param.data) for name, param in model.module.named_parameters()}
    assert kinds["last.weight"] is DTensor
    return {name: whole(p).detach() for name, p in model.module.named_parameters()}


def train_alone(kind, clips):
    net = Net()
    optimizer = OPTIMIZERS[kind](net.parameters(), False)
    for number in range(STEPS):
        freeze(net, number)
        optimizer.zero_grad()
        for replica in range(2):
            for batch in (number, number + 100):
                (net(samples(batch, replica)).square().mean() / 2).backward()
        if clips is not None:
            nn.utils.clip_grad_norm_(net.parameters(), *clips)
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


CASES = [("adamw", None), ("sgd", (0.1, 2.0)), ("nadam", (0.02, math.inf))]


@pytest.mark.slow(but=("1-adamw", "2-sgd"))
@pytest.mark.parametrize(("kind", "clips"), CASES, ids=[kind for kind, _ in CASES])
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_those_of_stage_0_and_of_one_process(stage, kind, clips):
    alone = train_alone(kind, clips)
    for ours, right in zip(
        run_ranks(train, 4, stage, kind, clips), run_ranks(train, 4, 0, kind, clips), strict=True
    ):
        for name, weight in ours.items():
            torch.testing.assert_close(weight, right[name], rtol=1e-11, atol=1e-12, msg=name)
            torch.testing.assert_close(weight, alone[name], rtol=1e-9, atol=1e-9, msg=name)


def held(rank, world, stage):
    """Bytes here of a DTensor's gradient and of the optimizer's state, over those of its part."""
    model, optimizer = made(stage)
    for number in range(2):
        step(model, optimizer, number)
    param = model.module.up.weight
    if stage:  # what ranks exchange needs no copies
        assert all(home is not None for _, home in model.reducer.sharded._homes)
    gradient = local(param.grad)
    gradient = gradient.share.piece if stage else gradient
    parts = sum(local(p).numel() for p in model.module.parameters())
    values = (value for state in held_state(optimizer).values() for value in state.values())
    elements = sum(local(value).numel() for value in values if value.dim())
    return gradient.numel() / param.to_local().numel(), elements / parts


def test_a_rank_holds_its_share_of_gradients_and_state_alone():
    for stage, share in ((0, 1.0), (1, 0.5), (2, 0.5)):
        found = run_ranks(held, 4, stage)
        gradients, states = zip(*found, strict=True)
        assert sum(gradients) / 4 == share, stage
        assert sum(states) / 4 == 3 * share, stage


def is_as_at_stage_0(script, stage):
    """Assert that `script(rank, world, stage)` has the same results within rounding."""
    for ours, right in zip(run_ranks(script, 4, stage), run_ranks(script, 4, 0), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-12)


def all_cut(stage):
    return made(stage, cuts=("up", "down", "last"))


def clipped(rank, world, stage, norm_type, by_torch):
    model, optimizer = all_cut(stage)
    for number in range(2):  # the second gradients are shared
        step(model, optimizer, number)
    optimizer.zero_grad()
    (100 * model(samples(7, rank // 2)).square().mean()).backward()
    params = [p for p in model.module.parameters() if p.requires_grad]
    if by_torch:
        norm = nn.utils.clip_grad_norm_(params, 0.1, norm_type)
    else:
        norm = model.clip_grad_norm_(0.1, norm_type)
    return whole(norm).item(), [whole(param.grad.clone()) for param in params]


@pytest.mark.slow(but=("2.0-ours", "2.0-torch"))
@pytest.mark.parametrize("by_torch", [False, True], ids=["ours", "torch"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_a_norm_counts_each_element_once(norm_type, by_torch):
    (right, wanted), *_ = run_ranks(clipped, 4, 0, norm_type, by_torch)
    assert right > 1
    for norm, grads in run_ranks(clipped, 4, 2, norm_type, by_torch):
        assert norm == pytest.approx(right)
        torch.testing.assert_close(grads, wanted)


def handled(rank, world, stage):
    """Do with gradients what scripts do."""
    model, optimizer = made(stage)
    step(model, optimizer, 0)
    optimizer.zero_grad()
    model(samples(1, rank // 2)).square().mean().backward()
    up, down, last = (model.module.get_submodule(n) for n in ("up", "down", "last"))
    kept = up.weight.grad, last.bias.grad
    up.bias.grad.mul_(0.5)
    down.weight.grad.add_(torch.ones_like(down.weight))
    last.weight.grad = 2 * last.weight.grad
    values = [whole(kept[0].clone()), whole(down.bias.grad).clone()]  # read, and plain from then on
    assert type(local(down.bias.grad)) is torch.Tensor
    model(samples(2, rank // 2)).square().mean().backward()  # adds to all of these
    optimizer.step()
    optimizer.zero_grad()
    model(samples(3, rank // 2)).square().mean().backward()
    values += [whole(kept[1].clone())]
    values += [whole(param.grad.clone()) for param in model.module.parameters()]
    return values + [whole(param).detach() for param in model.module.parameters()]


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_what_they_are_at_stage_0(stage):
    is_as_at_stage_0(handled, stage)


def through_an_older_graph(rank, world, stage):
    model, optimizer = made(stage)
    step(model, optimizer, 0)
    loss = model(samples(1, rank // 2)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_through_weights_before_a_step_is_an_error():
    run_ranks(through_an_older_graph, 4, 0)
    run_ranks(through_an_older_graph, 4, 1)


def steps_under_no_sync(rank, world):
    model, optimizer = all_cut(1)
    step(model, optimizer, 0)
    optimizer.zero_grad()
    with model.no_sync():
        model(samples(1, rank // 2)).square().mean().backward()
    with pytest.raises(RuntimeError, match="not averaged and differ between the ranks"):
        optimizer.step()


def test_a_step_on_gradients_that_nobody_averaged_is_an_error():
    run_ranks(steps_under_no_sync, 4)


class Partly(Net):
    """Leaves out what is cut, where it is told to."""

    def forward(self, x, cut):
        return super().forward(x) if cut else self.first(x)


def averages_in_another_wrapper(rank, world):
    """One replica alone uses what the optimizer, which another wrapper shares, steps on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Partly()
    parallelize_module(net, mesh["tp"], PLAN)
    options = {"process_group": mesh.get_group("dp"), "find_unused_parameters": True}
    model = FastDDP(net, zero=1, **options)
    optimizer = optim.SGD(net.up.parameters(), 0.1)
    for number in range(3):
        optimizer.zero_grad()
        model(samples(number, rank // 2), number == 0 or rank < 2).square().mean().backward()
        optimizer.step()
        if number == 0:
            before, model = model, FastDDP(net, zero=1, **options)
    assert before.module is model.module
    return [whole(param).detach() for param in net.up.parameters()]


def test_another_wrapper_has_averaged():
    first, *others = run_ranks(averages_in_another_wrapper, 4)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def weighed(rank, world, stage):
    model, optimizer = made(stage)
    for number in range(4):
        model.zero_grad(set_to_none=number % 2 == 0)
        for micro in range(2):
            with model.no_sync() if micro == 0 and number > 1 else contextlib.nullcontext():
                loss = model(samples(2 * number + micro, rank // 2)).square().sum()
                model.add_weight(1 + 2 * (rank // 2) + micro)
                loss.backward()
        optimizer.step()
    return [whole(param).detach() for param in model.module.parameters()]


@pytest.mark.slow("1")
@pytest.mark.parametrize("stage", [1, 2])
def test_weighted_means_are_those_of_stage_0(stage):
    is_as_at_stage_0(weighed, stage)


def scaled(rank, world, stage):
    model, optimizer = all_cut(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number in range(6):
        optimizer.zero_grad()
        loss = model(samples(number, rank // 2)).square().mean()
        scaler.scale(loss * math.inf if number == 3 and rank == 0 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), [whole(param).detach() for param in model.module.parameters()]


def test_a_scaler_leaves_out_the_step_on_all_ranks():
    is_as_at_stage_0(scaled, 2)
