"""Units beside tensor parallelism, replicate(), hooks on gradients and streams of hooks."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fastsync import fully_shard
from fastsync.testing import run_ranks
from tests.fsdp.fsdp_models import apply, farthest, loss_of, mesh_of, net, whole, words


class Feed(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def feeds(inner):
    torch.manual_seed(0)
    return nn.Sequential(*(Feed(5, inner) for _ in range(3)))


def meshes(world, rows):
    """Return the meshes of the ranks that share, and of those that compute together."""
    if rows == 1:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    names = ("replicas", "shards", "tp")
    mesh = init_device_mesh("cpu", (rows, world // rows // 2, 2), mesh_dim_names=names)
    return mesh["replicas", "shards"], mesh["tp"]


def in_two_directions(rank, world, rows, inner, keep):
    dp, tp = meshes(world, rows)
    model, alone = feeds(inner), feeds(inner)
    for feed in model:
        parallelize_module(feed, tp, PLAN)
        fully_shard(feed, mesh=dp, reshard_after_forward=not keep)
    fully_shard(model, mesh=dp)
    first = model[0].up.weight
    described = first.device_mesh.ndim, tuple(first.shape), first.placements[-1]
    starts = farthest(whole(model.parameters()), whole(alone.parameters()))
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, alone)]
    for step in range(4):
        batches = [torch.randn(3, 5, generator=seeded(step, r)) for r in range(world // 2)]
        model(batches[rank // 2]).square().sum().backward()
        for batch in batches:
            (alone(batch).square().sum() / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return described, starts, farthest(whole(model.parameters()), whole(alone.parameters()))


def seeded(step, row):
    return torch.Generator().manual_seed(10 * step + row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "rows", "inner", "keep"), [(4, 1, 16, False), (4, 1, 7, True), (4, 2, 16, False)]
)
def test_tensor_parallelism_inside_and_shares_across(world, rows, inner, keep):
    for described, starts, ends in run_ranks(in_two_directions, world, rows, inner, keep):
        assert described == (2 if rows == 1 else 3, (inner, 5), Shard(0))
        assert starts == 0
        assert ends < 2e-5


def placed(rank, world):
    """Gradients of DTensors that come as partial sums are placed before they travel."""
    dp, tp = meshes(world, 1)
    model = nn.Linear(4, 4, bias=False)
    weight = distribute_tensor(torch.eye(4), tp, [Replicate()])
    model.weight = nn.Parameter(weight)
    fully_shard(model, mesh=dp)
    batch = DTensor.from_local(torch.full((1, 4), 1.0 + rank), tp, [Shard(0)])
    model(batch).sum().backward()
    model.set_requires_gradient_sync(False)
    kept = model.weight.grad.full_tensor().clone()
    model(batch).sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch).sum().backward()
    return kept, model.weight.grad.full_tensor()


@pytest.mark.slow
def test_partial_gradients_of_tensor_parallelism():
    for once, thrice in run_ranks(placed, 4):
        assert torch.equal(once, torch.full((4, 4), (1.0 + 2 + 3 + 4) / 2))
        assert torch.equal(thrice, 3 * once)


def refused(rank, world):
    tp = init_device_mesh("cpu", (world,))
    model = parallelize_module(Feed(4, 4), tp, PLAN)
    with pytest.raises(NotImplementedError, match="DTensor already over ranks"):
        fully_shard(model)


def test_dtensors_over_the_same_ranks_are_refused():
    run_ranks(refused, 2)


def with_hooks(rank, world):
    model = apply(fully_shard, net())
    seen = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad)))
    model.set_requires_gradient_sync(False)
    loss_of(model, words(rank, 0)).backward()
    early = len(seen)
    model.set_requires_gradient_sync(True)
    for _ in range(2):  # the second adds to gradients that are there
        loss_of(model, words(rank, 0)).backward()
    names = [name for name, _ in model.named_parameters()]
    called = sorted(name for name, _ in seen) == sorted(names * 2)
    return early, called, all(grad is not None for _, grad in seen)


def test_hooks_run_after_the_gradients_of_shares_are_set():
    assert run_ranks(with_hooks, 2) == [(0, True, True)] * 2


def step_in_backward(rank, world):
    """An optimizer per parameter that steps as soon as its gradient is there."""
    ends = []
    for in_hooks in (False, True):
        model = apply(fully_shard, net())
        each = {p: torch.optim.AdamW([p], 0.01) for p in model.parameters()}

        def step(param, each=each):
            each[param].step()
            param.grad = None

        for param in model.parameters() if in_hooks else ():
            param.register_post_accumulate_grad_hook(step)
        for index in range(3):
            loss_of(model, words(rank, index)).backward()
            for param in () if in_hooks else model.parameters():
                step(param)
        ends.append(whole(model.parameters()))
    return farthest(*ends)


def test_optimizers_that_step_in_backward():
    assert run_ranks(step_in_backward, 2) == [0, 0]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(4, 4), Feed(4, 6)

    def forward(self, x):
        return self.inner(torch.relu(self.first(x)))


def beside_replicate(rank, world):
    model, alone = Outer(), Outer()
    fully_shard(model.inner)
    replicate(model)
    inp = torch.full((2, 4), 1.0 + rank)
    for _ in range(2):
        model(inp).sum().backward()
    for row in range(world):
        (alone(torch.full((2, 4), 1.0 + row)).sum() * 2 / world).backward()
    grads = [p.grad for p in model.parameters()]
    kinds = isinstance(model.first.weight, DTensor), isinstance(model.inner.up.weight, DTensor)
    return kinds, farthest(whole(grads), [p.grad for p in alone.parameters()])


def test_replicate_takes_what_fully_shard_leaves():
    for kinds, apart in run_ranks(beside_replicate, 2):
        assert kinds == (False, True)
        assert apart < 1e-5


def inside_replicated(rank, world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replicate(model[0])
    fully_shard(model)
    return [isinstance(p, DTensor) for p in model.parameters()]


def test_what_is_replicated_is_not_cut():
    assert run_ranks(inside_replicated, 2) == [[False, False, True, True]] * 2


def with_stream(rank, world):
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu", mesh_dim_names=("shards",))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    stream, seen = torch.cpu.Stream(), []
    model.set_all_reduce_hook(lambda sums: seen.append(torch.cpu.current_stream()), stream=stream)
    model(torch.ones(1, 4)).sum().backward()
    both = fully_shard(nn.Linear(4, 4), mesh=mesh_of(world, 2))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        both.set_all_reduce_hook(lambda sums: None, stream=stream)
    return seen == [stream], torch.cpu.current_stream() is stream


def test_hooks_on_a_stream():
    assert run_ranks(with_stream, 2) == [(True, False)] * 2


class Coded(nn.Module):
    """A frozen matrix in codes, and what is trained beside it."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        codes = torch.randint(-8, 8, (7, 5)).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.gain = nn.Parameter(torch.ones(7))
        self.rest = nn.Linear(7, 5)

    def forward(self, x):
        return self.rest(torch.tanh(x @ self.codes.to(x.dtype).t() * self.gain))


def with_codes(rank, world, dtype):
    model, alone = (nn.Sequential(Coded(dtype), Coded(dtype)) for _ in range(2))
    fully_shard(model[0])
    fully_shard(model)
    kinds = {type(m.codes) for m in model}, {tuple(m.codes.to_local().shape) for m in model}
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (model, alone)
    ]
    for step in range(3):
        model(torch.full((2, 5), 0.1 * (rank + step))).sum().backward()
        for row in range(world):
            (alone(torch.full((2, 5), 0.1 * (row + step))).sum() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        again = farthest([model(torch.ones(1, 5))], [alone(torch.ones(1, 5))])
    kept = {name: p.dtype for name, p in model.state_dict().items() if "codes" in name}
    return kinds, again, set(kept.values())


@pytest.mark.slow(but=("dtype2",))
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_frozen_parameters_of_dtypes_without_gradients(dtype):
    for rank, (kinds, apart, kept) in enumerate(run_ranks(with_codes, 2, dtype)):
        assert kinds == ({DTensor}, {(4 - rank, 5)})
        assert apart < 1e-6
        assert kept == {dtype}


def loaded_by_parts(rank, world):
    """Assigning a state dict gives a unit's parameters memory one module after another."""
    with torch.device("meta"):
        model = apply(fully_shard, net())
    source = apply(fully_shard, net())
    model.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=True)
    return farthest([model(words(rank, 0))], [source(words(rank, 0))])


def test_a_state_dict_is_assigned_to_a_model_on_the_meta_device():
    assert run_ranks(loaded_by_parts, 2) == [0, 0]


def forward_mode(rank, world):
    """The first forward runs inside torch.func.jvp."""
    torch.manual_seed(0)
    model, alone = nn.Linear(3, 4), nn.Linear(3, 4)
    alone.load_state_dict(model.state_dict())
    fully_shard(model, reshard_after_forward=False)
    inp, tangent = torch.ones(2, 3), torch.full((2, 3), 0.5)
    found, wanted = (torch.func.jvp(m, (inp,), (tangent,)) for m in (model, alone))
    model(inp.requires_grad_()).sum().backward()
    return farthest(found, wanted), tuple(model.weight.grad.full_tensor().shape)


def test_forward_mode_differentiation():
    assert run_ranks(forward_mode, 2) == [(0, (4, 3))] * 2
