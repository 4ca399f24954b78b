"""Each mode beside plain torch: the same parameters after every step, bit for bit."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import ChunkedTopK, Delayed, DiLoCo, FastDDP, LocalSGD, TopK
from fastsync.sync.schedule import cut
from tests.helpers.teams import run_ranks
from tests.sync import oracle

STEPS = 13
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}
MODES = {
    "local": LocalSGD(4),
    "local-every-step": LocalSGD(1),
    "post-local": LocalSGD(3, warmup=4),
    "diloco": DiLoCo(4),
    "post-diloco": DiLoCo(4, fragments=2, overlap=1, wire="int8", warmup=3),
    "diloco-without-momentum": DiLoCo(4, outer_lr=1.0, outer_momentum=0.0),
    "diloco-int4": DiLoCo(4, wire="int4"),
    "diloco-int8": DiLoCo(4, wire="int8"),
    "diloco-bf16": DiLoCo(3, wire="bf16"),
    "diloco-topk": DiLoCo(4, wire=TopK(0.1)),
    "diloco-chunked-topk": DiLoCo(4, wire=ChunkedTopK(0.002)),
    "streaming": DiLoCo(5, fragments=3),
    "streaming-overlapped": DiLoCo(6, fragments=2, overlap=2),
    "streaming-int4": DiLoCo(4, fragments=4, overlap=3, wire="int4", alpha=0.25),
    "streaming-chunked-topk": DiLoCo(4, fragments=3, overlap=1, wire=ChunkedTopK(0.004)),
    "delayed": Delayed(1),
    "delayed-by-3": Delayed(3),
}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2))


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loop(rank, model, optimizer):
    """A function that makes one step; it counts them."""
    steps = iter(range(10**6))

    def step():
        optimizer.zero_grad()
        model(batch(rank, next(steps))).square().mean().backward()
        optimizer.step()

    return step


def usual_loss(model, rank, step):
    return model(batch(rank, step)).square().mean()


@dataclass
class Training:
    """What is trained beside plain torch, and how.

    Attributes:
        make: an optimizer, by name.
        net: makes the module.
        loss: `loss(model, rank, step)`.
        ends: steps after which all ranks end the round.
        saves: steps after which it is saved, and goes on in new objects.
        zero: the stage of sharding.
    """

    mode: object
    make: str
    steps: int = STEPS
    net: Callable = net
    loss: Callable = usual_loss
    ends: Sequence = ()
    saves: Sequence = ()
    zero: int = 0

    def optimizer(self, params):
        return OPTIMIZERS[self.make](params)


def by_fastsync(rank, training):
    def build():
        model = FastDDP(training.net(), sync=training.mode, zero=training.zero)
        return model, training.optimizer(model.parameters())

    (model, optimizer), history = build(), []
    for step in range(1, training.steps + 1):
        optimizer.zero_grad()
        training.loss(model, rank, step).backward()
        optimizer.step()
        if step in training.ends:
            model.end_round()
        if step in training.saves:
            file = io.BytesIO()
            saved = (model.module.state_dict(), optimizer.state_dict(), model.sync_state_dict())
            torch.save(saved, file)
            file.seek(0)
            weights, inner, rounds = torch.load(file, weights_only=True)
            model, optimizer = build()
            model.module.load_state_dict(weights)
            optimizer.load_state_dict(inner)
            model.load_sync_state_dict(rounds)
        history.append([p.detach().clone() for p in model.parameters()])
    return history


def groups_of(rank, world, within):
    """The ranks of this rank's part, and those that have its place in each part."""
    if within == 1:
        return None, None
    inside = [dist.new_group(range(i, i + within)) for i in range(0, world, within)]
    across = [dist.new_group(range(i, world, within)) for i in range(within)]
    return inside[rank // within], across[rank % within]


def by_torch(rank, training):
    module, mode = training.net(), training.mode
    params = list(module.parameters())
    optimizer, steps = training.optimizer(params), iter(range(1, training.steps + 1))
    inside, across = groups_of(rank, dist.get_world_size(), mode.within)

    def local_step(averaged):
        optimizer.zero_grad()
        training.loss(module, rank, next(steps)).backward()
        if averaged or mode.within > 1:
            for p in (p for p in params if p.grad is not None):
                rows = oracle.everyones(p.grad * (1 / dist.get_world_size(inside)), inside)
                p.grad = sum(rows[1:], rows[0])
        optimizer.step()

    cuts = cut([p.numel() for p in params], getattr(mode, "fragments", 1))
    return oracle.train(mode, params, cuts, local_step, training.steps, training.ends, across)


def both(rank, world, training):
    return by_fastsync(rank, training), by_torch(rank, training)


def check(world, training):
    """Assert that each rank has the parameters of plain torch after each step."""
    for rank, (found, wanted) in enumerate(run_ranks(both, world, training)):
        for step, (ours, its) in enumerate(zip(found, wanted, strict=True), start=1):
            assert all(map(torch.equal, ours, its)), f"rank {rank}, step {step}: {training}"


@pytest.mark.slow(but=("2-adamw",))
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_parameters_are_those_of_the_oracle(world, make):
    for mode in MODES.values():
        check(world, Training(mode, make))


HYBRID = {
    "local": LocalSGD(3, within=2),
    "diloco": DiLoCo(4, within=2),
    "streaming-int4": DiLoCo(4, fragments=2, overlap=1, wire="int4", within=2),
    "delayed": Delayed(2, within=2),
    "one-part": DiLoCo(3, within=4),
}


# A shard adds the gradients of more than two ranks in another order.
HYBRID_CASES = [("one-part", 0)] + [
    (name, zero) for name in HYBRID if name != "one-part" for zero in (0, 1, 2)
]


@pytest.mark.slow(but=("streaming-int4-0", "delayed-1"))
@pytest.mark.parametrize(("name", "zero"), HYBRID_CASES)
def test_parts_average_gradients_within_and_parameters_between(name, zero):
    check(4, Training(HYBRID[name], "adamw", saves=[5], zero=zero))
