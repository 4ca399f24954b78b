"""fastsync.fully_shard by FSDP2's contract: beside torch's, and beside a run without ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fastsync import FSDPModule, fully_shard
from fastsync.fsdp.module_hooks import state_of
from tests.fsdp.fsdp_models import (
    OPTIMIZERS,
    Block,
    Net,
    apply,
    farthest,
    loss_of,
    mesh_of,
    net,
    train,
    train_alone,
    whole,
    words,
)
from tests.helpers.teams import run_ranks


def both(rank, world, make, options, rows):
    """Weights and norms of torch's and of ours."""
    results = []
    for shard in (torchs, fully_shard):
        model = apply(shard, net(), mesh=mesh_of(world, rows), **options)
        results.append(train(model, rank, OPTIMIZERS[make](model.parameters())))
    return results


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
RUNS = {
    "two": (2, "adamw", {}, None),
    "momentum": (2, "sgd", {}, None),
    "three": (3, "adamw", {}, None),
    "kept": (2, "adamw", {"reshard_after_forward": False}, None),
    "resharded": (2, "adamw", {"reshard_after_forward": True}, None),
    "replicas": (4, "adamw", {}, 2),
    "lower precision": (2, "adamw", {"mp_policy": BF16}, None),
    "lower gradients": (3, "sgd", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, None),
}


@pytest.mark.slow(but=("momentum",))
@pytest.mark.parametrize("run", RUNS)
def test_weights_are_those_of_fsdp2(run):
    world, make, options, rows = RUNS[run]
    for (wanted, norms), (found, ours) in run_ranks(both, world, make, options, rows):
        assert farthest(found, wanted) <= (1e-6 if "lower" not in run else 2e-2)
        assert ours == pytest.approx(norms, rel=1e-5 if "lower" not in run else 5e-2)


def ours(rank, world, make):
    model = apply(fully_shard, net())
    return train(model, rank, OPTIMIZERS[make](model.parameters()))[0]


@pytest.mark.slow(but=("1-adamw",))
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 4])  # two and three beside FSDP2
def test_weights_are_those_of_one_process(world, make):
    wanted = train_alone(world, make)
    for found in run_ranks(ours, world, make):
        assert farthest(found, wanted) <= 1e-5


def parts(rank, world):
    model = apply(fully_shard, net())
    before = dict(model.named_parameters())
    loss_of(model, words(rank, 0)).backward()
    after = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in before.items()}
    locals_ = {name: tuple(p.to_local().shape) for name, p in before.items()}
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in before.values())
    assert all(before[name] is p for name, p in after.items())
    for param in after.values():
        assert isinstance(param.grad, DTensor) and param.grad.placements == (Shard(0),)
        assert param.grad.to_local().shape == param.to_local().shape
    for module in (model, model.blocks[0]):
        assert isinstance(module, FSDPModule) and isinstance(module, TorchModule)
    return shapes, locals_


def test_parameters_and_gradients_are_dtensors_with_global_sizes():
    wanted = {name: tuple(p.shape) for name, p in net().named_parameters()}
    results = run_ranks(parts, 3)
    for shapes, _ in results:
        assert shapes == wanted
    for name, sizes in wanted.items():
        rows = [locals_[name][0] for _, locals_ in results]
        chunks = [len(chunk) for chunk in torch.arange(sizes[0]).chunk(3)]
        assert rows == [*chunks, 0, 0][:3]


def bytes_of_a_step(rank, world, options):
    model = apply(fully_shard, net(4, 256), **options)
    counted = []
    for step in range(3):
        loss_of(model, words(rank, step)).backward()
        stats = state_of(model).context.counters()
        counted.append(sum(s["gathered_bytes"] + s["reduced_bytes"] for s in stats))
    return counted[2] - counted[1], sum(p.numel() * 4 for p in net(4, 256).parameters())


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_sends_three_times_the_parameters(world):
    for sent, bytes_ in run_ranks(bytes_of_a_step, world, {"reshard_after_forward": True}):
        assert sent == pytest.approx(3 * (world - 1) / world * bytes_, rel=0.01)
    for sent, bytes_ in run_ranks(bytes_of_a_step, world, {"reshard_after_forward": False}):
        assert sent == pytest.approx(2 * (world - 1) / world * bytes_, rel=0.01)


def accumulate(rank, world, how):
    """Three batches, then a step; by communication each time, or at the end."""
    model = apply(fully_shard, net(), mp_policy=BF16 if how == "lower" else MixedPrecisionPolicy())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sent = []
    for step in range(3):
        model.set_requires_gradient_sync(how == "each" or step == 2)
        if how == "kept":
            model.set_reshard_after_backward(step == 2)
        loss_of(model, words(rank, step)).backward()
        sent.append(sum(s["reductions"] for s in state_of(model).context.counters()))
    optimizer.step()
    return whole(model.parameters()), sent


@pytest.mark.slow(but=("lower",))
@pytest.mark.parametrize("how", ["each", "once", "kept", "lower"])
def test_gradients_accumulate(how):
    wanted = train_alone(2, "sgd", steps=1, clip=None, batches=3)
    for found, sent in run_ranks(accumulate, 2, how):
        assert farthest(found, wanted) <= (2e-2 if how == "lower" else 1e-6)
        assert sent == ([4, 8, 12] if how == "each" else [0, 0, 4])


def replicas_accumulate(rank, world):
    model = apply(fully_shard, net(), mesh=mesh_of(world, 2))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        loss_of(model, words(rank, step)).backward()
        if step == 0:
            assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    return whole(model.parameters())


def test_replicas_accumulate_before_they_meet():
    wanted = train_alone(4, "sgd", steps=1, clip=None, batches=2)
    for found in run_ranks(replicas_accumulate, 4):
        assert farthest(found, wanted) <= 1e-6


class Again(Block):
    """Computes a part of itself again."""

    def forward(self, x):
        y = checkpoint(self.up, self.norm(x), use_reentrant=False)
        return x + self.down(torch.relu(y)) * self.gain


class CheckpointedTwice(Net):
    """Its blocks are one unit: all of them are computed again, and then a part of each."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.__class__ = Again

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words):
        return self.head(checkpoint(self.run, self.embed(words), use_reentrant=True))


def with_checkpoints_in_each_other(rank, world):
    torch.manual_seed(0)
    model = CheckpointedTwice()
    fully_shard(list(model.blocks))
    fully_shard(model)
    return train(model, rank, OPTIMIZERS["adamw"](model.parameters()))[0]


def test_a_unit_of_several_modules_within_two_checkpoints():
    wanted = train_alone(2, "adamw")
    for found in run_ranks(with_checkpoints_in_each_other, 2):
        assert farthest(found, wanted) <= 1e-5


class Choosing(nn.Module):
    """Uses some parameters on some ranks only, one nowhere, and not all outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x, rank):
        return self.first(x) if rank == 0 else self.second(x)


def choose(rank, world):
    torch.manual_seed(0)
    model = fully_shard(Choosing())
    model(torch.ones(2, 4), rank).sum().backward()
    return {
        n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()
    }


def test_parameters_that_some_ranks_do_not_use():
    torch.manual_seed(0)
    model = Choosing()
    sum(model(torch.ones(2, 4), rank).sum() / 2 for rank in range(2)).backward()
    for found in run_ranks(choose, 2):
        assert found["never"] is None
        for name, param in model.named_parameters():
            if name != "never":
                assert torch.allclose(found[name], param.grad)


def from_meta(rank, world):
    with torch.device("meta"):
        model = Net()
    apply(fully_shard, model)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        model(words(rank, 0))
    model.to_empty(device="cpu")
    for param, value in zip(model.parameters(), net().parameters(), strict=True):
        param.data.copy_(
            torch.distributed.tensor.distribute_tensor(value, param.device_mesh, [Shard(0)])
        )
    return train(model, rank, OPTIMIZERS["adamw"](model.parameters()))[0]


@pytest.mark.slow
def test_models_from_the_meta_device():
    wanted = train_alone(2, "adamw")
    for found in run_ranks(from_meta, 2):
        assert farthest(found, wanted) <= 1e-5
