"""Inputs and outputs of units: nested arguments, none, dtypes; and where units come from."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fastsync import FSDPModule, fully_shard
from fastsync._torch import local_of
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import apply, farthest, loss_of, mesh_of, net, whole, words
from tests.helpers.teams import run_ranks


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass
class Box:
    x: torch.Tensor
    size: int


WRAP = {
    "tensor": (lambda x: x, lambda x: x),
    "dictionary": (lambda x: {"x": [x], "n": 1}, lambda d: d["x"][0]),
    "named tuple": (lambda x: Pair(x, "p"), lambda p: p.x),
    "dataclass": (lambda x: Box(x, 1), lambda b: b.x),
}


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, inp):
        wrap, unwrap = WRAP[self.kind]
        return wrap(torch.tanh(self.layer(unwrap(inp))))


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.kind = nn.ModuleList(Nested(kind) for _ in range(3)), kind

    def forward(self, x):
        wrap, unwrap = WRAP[self.kind]
        inp = wrap(x)
        for layer in self.layers:
            inp = layer(inp)
        return unwrap(inp)


def nested(rank, world, kind):
    model, alone = Stack(kind), Stack("tensor")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.full((2, 4), 1.0 + rank)).sum().backward()
    for row in range(world):
        (alone(torch.full((2, 4), 1.0 + row)).sum() / world).backward()
    return farthest(
        whole([p.grad for p in model.parameters()]), [p.grad for p in alone.parameters()]
    )


@pytest.mark.slow("tensor")
@pytest.mark.parametrize("kind", list(WRAP))
def test_activations_in_containers(kind):
    assert max(run_ranks(nested, 2, kind)) < 1e-6


class NoInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self):
        return self.weight @ self.weight


def without(rank, world):
    model = fully_shard(NoInput())
    (model().sum() * (1 + rank)).backward()
    empty = fully_shard(nn.Sequential(nn.ReLU()))
    empty.unshard()
    return model.weight.grad.full_tensor(), empty(torch.ones(2))


def test_forwards_without_inputs_and_modules_without_parameters():
    for grad, out in run_ranks(without, 2):
        assert torch.equal(grad, torch.full((4, 4), 3.0))  # 2 per element, times 1.5
        assert torch.equal(out, torch.ones(2))


class Noting(nn.Linear):
    def forward(self, x):
        self.seen = [*getattr(self, "seen", []), x.dtype]
        return super().forward(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.outputs = Noting(2, 2), []

    def run(self, x):
        y = self.layer(x)
        self.outputs.append(y.dtype)
        return y

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False, early_stop=False).float().sum()


def recompute(rank, world):
    model = Checkpointed()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model.layer, mp_policy=policy)
    fully_shard(model)
    model(torch.ones(3, 2)).backward()
    return model.layer.seen, model.outputs


def test_what_is_computed_again_is_cast_as_the_first_time():
    for seen, outputs in run_ranks(recompute, 2):
        assert seen == [torch.bfloat16] * 2
        assert outputs == [torch.float32] * 2


class Outside(nn.Module):
    """Hands a child a tensor that did not come in."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Bilinear(2, 2, 2)

    def forward(self, x):
        return self.second(self.first(x), torch.ones(x.shape[0], 2))


def from_outside(rank, world, cast):
    model = Outside()
    seen = []
    model.second.register_forward_pre_hook(lambda m, args: seen.extend(a.dtype for a in args))
    policy = MixedPrecisionPolicy(torch.float16, cast_forward_inputs=cast)
    fully_shard(model.second, mp_policy=policy)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16))
    try:
        model(torch.ones(3, 2)).sum().backward()
    except RuntimeError as error:
        assert "dtype" in str(error) or "Half" in str(error)
    return seen


@pytest.mark.parametrize("cast", [True, False])
def test_tensors_from_outside_are_cast_where_that_is_asked_for(cast):
    last = torch.float16 if cast else torch.float32
    assert run_ranks(from_outside, 2, cast) == [[torch.float16, last]] * 2


def of_groups(rank, world):
    """Meshes made of process groups are as good as others."""
    mesh = mesh_of(world, 2)
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names]
    again = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    grads = []
    for each in (mesh, again):
        model = apply(fully_shard, net(), mesh=each)
        loss_of(model, words(rank, 0)).backward()
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_meshes_of_process_groups():
    assert all(run_ranks(of_groups, 4))


def from_first_replica(rank, world):
    mesh = mesh_of(world, 2)
    model = apply(fully_shard, net(), mesh=mesh)
    row, group = mesh.get_local_rank("replicas"), mesh.get_group("replicas")
    for param in model.parameters():
        if row > 0:
            param.detach().fill_(7)
        dist.broadcast(param.to_local(), dist.get_global_rank(group, 0), group)
    loss_of(model, words(rank, 0)).backward()
    return farthest(whole(model.parameters()), whole(net().parameters()))


def test_replicas_take_over_the_first_ones_weights():
    assert run_ranks(from_first_replica, 4) == [0] * 4


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.norm = nn.Parameter(torch.empty(3))

    def forward(self, x):
        return self.layer(x).sum() + self.norm.sum()


def replaced(rank, world):
    """A parameter is exchanged for one that is made of another's shares before any forward."""
    with torch.device("meta"):
        model = Normed()
    fully_shard(model.layer)
    fully_shard(model)
    model.layer.to_empty(device="cpu")
    with torch.no_grad():
        model.layer.weight.fill_(2.0)
        model.norm = nn.Parameter(torch.linalg.norm(model.layer.weight, dim=1))
    loss = model(torch.ones(1, 3))
    loss.backward()
    return loss.item(), model.norm.grad.full_tensor()


def test_parameters_that_are_replaced_before_the_first_forward():
    for loss, grad in run_ranks(replaced, 2):
        assert loss == pytest.approx(18 + 3 * 12**0.5)
        assert torch.equal(grad, torch.ones(3))


def described(rank, world):
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)))
    before = [(tuple(p.shape), p.stride()) for p in model.parameters()]
    twice = nn.Linear(2, 2)
    tied = nn.Sequential(twice, twice)
    fully_shard(model[1])
    fully_shard(model)
    fully_shard(tied)
    after = [(tuple(p.shape), p.stride()) for p in model.parameters()]
    classes = type(model).__name__, type(model[1][0]).__name__, type(model[1][:1]).__name__
    own = isinstance(model[1], FSDPModule), isinstance(model[1][1], FSDPModule)
    return before == after, classes, own, all(isinstance(p, DTensor) for p in tied.parameters())


def test_classes_and_sizes_of_what_was_applied():
    wanted = (True, ("FSDPSequential", "Linear", "Sequential"), (True, False), True)
    assert run_ranks(described, 2) == [wanted] * 2


def two_placements(rank, world):
    """Shares across another dimension than tensor parallelism's, and across the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for dim in (0, 1):
        layer = nn.Linear(4, 8, bias=False)
        start = layer.weight.detach().clone()
        dist.broadcast(start, 0)
        layer.weight = nn.Parameter(distribute_tensor(start, mesh["tp"], [Shard(0)]))
        other = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
        layer.register_parameter("other", other)
        place = lambda p, dim=dim: Shard(dim) if p.ndim == 2 else None  # noqa: E731
        fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=place)
        placed = layer.weight.placements[1], layer.other.placements
        found.append((torch.equal(layer.weight.full_tensor(), start), placed))
    return found


def test_placements_beside_tensor_parallelism():
    placed = (Shard(0), (Shard(0), Replicate()))
    assert run_ranks(two_placements, 4) == [[(True, placed)] * 2] * 4


def at_first(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    fully_shard(model[0])
    fully_shard(model)
    wanted = r"on meta device: \['1.0.weight', '1.0.bias'\]"
    with pytest.raises(RuntimeError, match=wanted):
        model(torch.ones(1, 2))
    names = [unit.name for unit in state_of(model).context.units()]
    pair = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match="requires a single root module"):
        pair[0](torch.ones(1, 2))
    extended = fully_shard(nn.Linear(2, 2))
    local_of(extended.weight).fsdp_pre_all_gather = lambda *args: None
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather"):
        extended(torch.ones(1, 2))
    return names, state_of(model).is_root, state_of(model[0]).is_root


def test_what_the_first_forward_finds_out():
    assert run_ranks(at_first, 2) == [(["", "0"], True, False)] * 2


def with_a_sparse_gradient(rank, world):
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 2)))
    with pytest.raises(RuntimeError, match=r"'0.weight' has a sparse gradient.* use zero=2"):
        model(torch.tensor([rank, 2])).sum().backward()


def test_a_sparse_gradient_is_an_error():
    run_ranks(with_a_sparse_gradient, 2)
