"""Tensor parallel layers, whose parameters are DTensors: local tensors are averaged."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fastsync import FastDDP, Group, Wire, fully_shard
from tests.helpers import parallel_models
from tests.helpers.parallel_models import Experts
from tests.helpers.teams import run_ranks

STEPS = 20


class Net(nn.Module):
    """Two layers around tensor parallel ones."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x, used=True):
        x = self.norm(self.first(x))
        return self.down(self.up(x).tanh()) if used else x


def samples(step, replica):
    draw = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(6, 4, generator=draw, dtype=torch.float64)


def cut(net, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


def train(rank, world, by_mesh, options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"])
    where = {"device_mesh": mesh["dp"]} if by_mesh else {"process_group": mesh.get_group("dp")}
    model = FastDDP(net, bucket_cap_mb=1e-5, **where, **options)
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            model(samples(step, rank // 2)).square().mean().backward()
        model(samples(step + 100, rank // 2)).square().mean().backward()
        optimizer.step()
    kinds = {name: type(param.data).__name__ for name, param in net.named_parameters()}
    return {name: whole(param).detach() for name, param in net.named_parameters()}, kinds


@pytest.mark.slow(but=("gloo-mesh",))
@pytest.mark.parametrize("by_mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize(
    "options", [{}, {"wire": Wire(shared_memory=False)}], ids=["memory", "gloo"]
)
def test_weights_are_those_of_one_process(by_mesh, options):
    net = Net()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            for number in (step, step + 100):
                (net(samples(number, replica)).square().mean() / 2).backward()
        optimizer.step()
    for weights, kinds in run_ranks(train, 4, by_mesh, options):
        assert kinds["up.weight"] == "DTensor"
        for name, param in net.named_parameters():
            torch.testing.assert_close(weights[name], param.detach(), rtol=1e-9, atol=1e-9)


# What `parallelize_module` cuts of `Experts`: the layers of all tokens, and those of an expert.
DENSE = {
    "first": ColwiseParallel(output_layouts=Replicate()),
    "last": RowwiseParallel(input_layouts=Replicate()),
}
EXPERT = {"experts.all.0": ColwiseParallel(), "experts.all.2": RowwiseParallel()}


def wrap_cut_experts(net, mesh):
    """Cut the experts as the rest. No two ranks have the same part of one."""
    parallelize_module(net, mesh["tp"], {**DENSE, **EXPERT})
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    experts = Group(alone, divisor=2)
    return FastDDP(net, process_group=mesh.get_group("ep"), groups={"experts.*": experts})


def wrap_whole_experts(net, mesh):
    """Leave the experts whole: ranks that share the layers of all tokens have the same one."""
    parallelize_module(net, mesh["tp"], DENSE)
    same = Group(mesh.get_group("tp"), divisor=4)
    part = mesh.get_group("ep")
    return FastDDP(net, groups={"experts.*": same, "first.*": part, "last.weight": part})


def train_experts(rank, world, wrap, clips=None):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    net = Experts(mesh.get_group("ep"), rank // 2)
    model = wrap(net, mesh)
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        x, y = parallel_models.samples(step, rank // 2)
        optimizer.zero_grad()
        (model(x, step) - y).square().mean().backward()
        if clips is not None:
            model.clip_grad_norm_(*clips)
        optimizer.step()
    return {name: whole(param).detach() for name, param in net.named_parameters()}


@pytest.mark.slow(but=("2-whole",))
@pytest.mark.parametrize("wrap", [wrap_cut_experts, wrap_whole_experts], ids=["cut", "whole"])
@pytest.mark.parametrize("clips", [None, (0.1, 2.0), (0.02, math.inf)], ids=["", "2", "inf"])
def test_experts_beside_tensor_parallelism_are_those_of_one_process(wrap, clips):
    net = Experts()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(2):
            x, y = parallel_models.samples(step, replica)
            ((net(x, step) - y).square().mean() / 2).backward()
        if clips is not None:
            nn.utils.clip_grad_norm_(net.parameters(), *clips)
        optimizer.step()
    right = {name: param.detach() for name, param in net.named_parameters()}
    for rank, weights in enumerate(run_ranks(train_experts, 4, wrap, clips)):
        for name, weight in weights.items():
            wanted = right[name.replace("all", str(rank // 2))]
            torch.testing.assert_close(weight, wanted, rtol=1e-9, atol=1e-9, msg=f"{rank} {name}")


def clip(rank, world, norm_type):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"])
    model = FastDDP(net, process_group=mesh.get_group("dp"))
    (10 * model(samples(0, rank // 2)).square().mean()).backward()
    before = net.up.weight.grad
    norm = model.clip_grad_norm_(0.1, norm_type)
    return norm, [whole(param.grad) for param in net.parameters()], before is net.up.weight.grad


@pytest.mark.slow(but=("2.0",))
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_a_norm_counts_each_part_once(norm_type):
    net = Net()
    for replica in range(2):
        (5 * net(samples(0, replica)).square().mean()).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type)
    assert norm > 0.1
    for found, grads, same in run_ranks(clip, 4, norm_type):
        torch.testing.assert_close(found, norm)
        torch.testing.assert_close(grads, [param.grad for param in net.parameters()])
        assert same


class OptionalExpert(nn.Module):
    """Two layers that all ranks have, and an expert."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.shared, self.head = nn.Linear(4, 6).double(), nn.Linear(6, 6).double()
        self.expert = nn.Linear(6, 6).double()

    def forward(self, x, uses):
        x = self.head(self.shared(x))
        return self.expert(x) if uses else x


def clip_with_an_unused_expert(rank, world, cut, zero):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    net = OptionalExpert()
    for layer in cut:
        parallelize_module(net, mesh["tp"], {layer: ColwiseParallel(output_layouts=Replicate())})
    alone = [dist.new_group([each]) for each in range(4)][rank]
    groups = {"expert.*": Group(alone, divisor=2)}
    model = FastDDP(net, process_group=mesh.get_group("ep"), groups=groups, zero=zero)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        model(samples(step, rank // 2), uses=rank < 2).square().mean().backward()
        norms.append(model.clip_grad_norm_(0.1))
        optimizer.step()
    return norms, [param.grad is not None for param in net.parameters()]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("cut", [["expert"], ["expert", "head"]])
def test_a_norm_where_some_ranks_use_no_expert(cut, zero):
    """Without it, these ranks have no DTensors as gradients, or only such as `zero` spreads."""
    net = OptionalExpert()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        for replica in range(2):
            (net(samples(step, replica), uses=replica == 0).square().mean() / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
    for rank, (found, there) in enumerate(run_ranks(clip_with_an_unused_expert, 4, cut, zero)):
        assert there == [True] * 4 + [rank < 2] * 2
        torch.testing.assert_close(found, norms)


class Uneven(nn.Module):
    """Layers of which the last one cannot be cut into equal parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.double()

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def with_uneven_parts(rank, world):
    """Average all plain parameters over all ranks, in buckets whose caps the largest part fills."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Uneven()
    last = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh["tp"], {"last": last})
    caps = [90 / 2**20, 1.0]
    groups = {"last.*": mesh.get_group("dp")}
    model = FastDDP(net, groups=groups, bucket_cap_mb_list=caps)
    for step in range(2):
        model.zero_grad()
        model(samples(step, rank // 2)).square().mean().backward()
    plan = [bucket.params for bucket in model._engine.plan.buckets]
    return plan, {name: whole(param.grad) for name, param in net.named_parameters()}


def test_parts_of_unequal_size_fill_buckets_alike():
    net = Uneven()
    for replica in range(2):
        (net(samples(1, replica)).square().mean() / 2).backward()
    (plan, _), *others = found = run_ranks(with_uneven_parts, 4)
    assert all(other == plan for other, _ in others)
    for _, grads in found:
        for name, param in net.named_parameters():
            torch.testing.assert_close(grads[name], param.grad)


def replicate(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(seed=rank // 2), mesh["tp"])
    with torch.no_grad():
        net.up.weight.to_local().fill_(rank)
    FastDDP(net, process_group=mesh.get_group("dp"))
    return net.up.weight.to_local()[0, 0].item(), whole(net.down.bias).detach()


def test_shards_are_replicated_within_the_process_group():
    for rank, (shard, bias) in enumerate(run_ranks(replicate, 4)):
        assert shard == rank % 2
        assert torch.equal(bias, Net(seed=0).down.bias)


def averaged_by_other_parts(rank, world, by_groups):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"])
    before = net.up.weight.to_local().detach().clone()
    same, tp = (mesh.get_group(name) for name in ("dp", "tp"))
    groups = {"up.*": tp, "down.weight": same} if by_groups else None
    try:
        FastDDP(net, groups=groups)
    except ValueError as error:
        return str(error), torch.equal(before, net.up.weight.to_local())


@pytest.mark.parametrize("by_groups", [False, True], ids=["all-ranks", "groups"])
def test_ranks_that_have_different_parts_do_not_average_them(by_groups):
    found = run_ranks(averaged_by_other_parts, 4, by_groups)
    for rank, (text, untouched) in enumerate(found):
        average = ([0, 1, 2, 3], [0, 1] if rank < 2 else [2, 3])[by_groups]
        parts = [0, 1] if rank < 2 else [2, 3]
        assert f"'up.weight' is a DTensor of which ranks {parts} have different parts" in text
        assert f"but ranks {average} would average them; pass the ranks" in text
        assert untouched


def around_shards(rank, world, shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    net = Net()
    shard(net.up, mesh=mesh["shard"])
    try:
        FastDDP(net, process_group=mesh.get_group("dp"))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("shard", [fully_shard, fsdp.fully_shard], ids=["ours", "torch"])
def test_shards_of_fully_shard_are_refused(shard):
    for text in run_ranks(around_shards, 4, shard):
        assert "'up.weight' is a shard of FastDDP(zero=3) or fully_shard already" in text


def replicate_one_row(rank, world):
    """A part of one row keeps the stride of the whole row."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(4, 1, bias=False))
    parallelize_module(net, mesh["tp"], {"0": RowwiseParallel()})
    before = net[0].weight.to_local().detach().clone()
    FastDDP(net, process_group=mesh.get_group("dp"))
    return torch.equal(before, net[0].weight.to_local())


def test_a_single_row_is_replicated():
    assert run_ranks(replicate_one_row, 2) == [True, True]


def ignored(rank, world):
    """Train a model of which the user ignores one DTensor, which is another one on each rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"])
    with torch.no_grad():
        net.up.weight.to_local().fill_(rank)
    FastDDP._set_params_and_buffers_to_ignore_for_model(net, ["up.weight"])
    model = FastDDP(net, process_group=mesh.get_group("dp"))
    model(samples(0, rank // 2)).square().sum().backward()
    return net.up.weight.to_local()[0, 0].item(), net.up.weight.grad.to_local()


def test_an_ignored_one_stays_each_ranks_own():
    (first, grad), _, (second, other), _ = run_ranks(ignored, 4)
    assert (first, second) == (0, 2)
    assert not torch.equal(grad, other)


def used_by_one_replica(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"])
    model = FastDDP(net, process_group=mesh.get_group("dp"))
    found = []
    for step in range(3):
        model.zero_grad()
        model(samples(0, 0), used=rank < 2 and step < 2).square().mean().backward()
        grad = net.up.weight.grad
        found.append(None if grad is None else whole(grad))
    return found


def test_layers_that_one_replica_uses_get_half_of_its_gradient():
    net = Net()
    (net(samples(0, 0)).square().mean() / 2).backward()
    for found in run_ranks(used_by_one_replica, 4):
        for grad in found[:2]:
            torch.testing.assert_close(grad, net.up.weight.grad)
        assert found[2] is None


def unfrozen_later(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"])
    net.up.weight.requires_grad_(False)
    model = FastDDP(net, process_group=mesh.get_group("dp"))
    found = []
    for step in range(3):
        net.up.weight.requires_grad_(step > 0)
        model.zero_grad()
        model(samples(step, rank // 2)).square().mean().backward()
        found.append(net.up.weight.grad)
    return [None if grad is None else whole(grad) for grad in found]


def test_one_that_is_unfrozen_after_wrapping_is_averaged():
    net = Net()
    right = []
    for step in range(3):
        net.zero_grad()
        for replica in range(2):
            (net(samples(step, replica)).square().mean() / 2).backward()
        right.append(net.up.weight.grad)
    for first, *later in run_ranks(unfrozen_later, 4):
        assert first is None
        torch.testing.assert_close(later, right[1:])


def changed_in_between(rank, world, is_cut):
    """Change gradients between forward and backward; rank 1 does not use all layers then."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    net = cut(Net(), mesh["tp"]) if is_cut else Net()
    model = FastDDP(net, process_group=mesh.get_group("dp"))
    found = []
    for change, used in ((None, False), (None, True), (0.5, True)):
        model(samples(0, rank)).square().mean().backward()
        loss = model(samples(1, rank), used=used and rank == 0).square().mean()
        for param in net.parameters():
            param.grad = None if change is None else param.grad * change
        loss.backward()
        grad = net.up.weight.grad
        found.append(None if grad is None else whole(grad).clone())
    return found


def test_gradients_that_change_after_the_forward_are_those_of_plain_tensors():
    plain, cut_ones = (run_ranks(changed_in_between, 2, is_cut) for is_cut in (False, True))
    for wanted, found in zip(plain, cut_ones, strict=True):
        assert wanted[0] is None and found[0] is None
        torch.testing.assert_close(found[1:], wanted[1:])


class Norm(nn.Module):
    """A norm of rows that are cut over the mesh, so that its gradients are to be summed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4).double()

    def forward(self, x):
        return self.norm(x)


def with_partial_gradients(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Norm()
    parallelize_module(net.norm, mesh["tp"], SequenceParallel(sequence_dim=0))
    model = FastDDP(net, process_group=mesh.get_group("dp"))
    for _ in range(2):  # the second one adds to the first
        rows = samples(0, rank // 2)[3 * (rank % 2) :][:3]
        with contextlib.nullcontext() if _ else model.no_sync():
            model(rows).to_local().square().sum().backward()
    grad = net.norm.weight.grad
    return grad.to_local(), grad.placements


def test_partial_gradients_are_summed_over_the_mesh():
    net = Norm()
    for replica in range(2):
        for _ in range(2):
            (net(samples(0, replica)).square().sum() / 2).backward()
    for grad, placements in run_ranks(with_partial_gradients, 4):
        assert placements == (Replicate(),)
        torch.testing.assert_close(grad, net.norm.weight.grad)
