"""Each mode beside plain torch: the same parameters after every step, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import ChunkedTopK, Delayed, DiLoCo, FastDDP, LocalSGD, TopK
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
CUTS = {1: [range(6)], 2: [range(0, 2), range(2, 6)], 3: [range(0, 1), range(1, 4), range(4, 6)]}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2))


def batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loop(rank, model, optimizer, before_step=lambda: None):
    """A function that makes one step; it counts them."""
    steps = iter(range(10**6))

    def step():
        optimizer.zero_grad()
        model(batch(rank, next(steps))).square().mean().backward()
        before_step()
        optimizer.step()

    return step


def by_fastsync(rank, mode, make):
    model = FastDDP(net(), sync=mode)
    step = loop(rank, model, make(model.parameters()))
    history = []
    for _ in range(STEPS):
        step()
        history.append([p.detach().clone() for p in model.parameters()])
    return history


def groups_of(rank, world, within):
    """The ranks of this rank's part, and those that have its place in each part."""
    if within == 1:
        return None, None
    inside = [dist.new_group(range(i, i + within)) for i in range(0, world, within)]
    across = [dist.new_group(range(i, world, within)) for i in range(within)]
    return inside[rank // within], across[rank % within]


def by_torch(rank, mode, make, cuts):
    model = net()
    params = list(model.parameters())
    inside, across = groups_of(rank, dist.get_world_size(), mode.within)

    def average():
        if averaging[-1] or mode.within > 1:
            for p in params:
                rows = oracle.everyones(p.grad * (1 / dist.get_world_size(inside)), inside)
                p.grad = sum(rows[1:], rows[0])

    averaging = []
    step = loop(rank, model, make(params), average)

    def local_step(averaged):
        averaging.append(averaged)
        step()

    return oracle.train(mode, params, cuts, local_step, STEPS, group=across)


def beside_torch(rank, world, mode, make):
    from fastsync.sync.schedule import cut

    sizes = [p.numel() for p in net().parameters()]
    cuts = cut(sizes, getattr(mode, "fragments", 1))
    make = OPTIMIZERS[make]
    return by_fastsync(rank, mode, make), by_torch(rank, mode, make, cuts)


@pytest.mark.slow(but=("2-adamw",))
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_parameters_are_those_of_the_oracle(world, make):
    for name, mode in MODES.items():
        for rank, (found, wanted) in enumerate(run_ranks(beside_torch, world, mode, make)):
            for step, (ours, its) in enumerate(zip(found, wanted, strict=True), start=1):
                same = all(map(torch.equal, ours, its))
                gap = max((a - b).abs().max().item() for a, b in zip(ours, its, strict=True))
                assert same, f"{name}, rank {rank}, step {step}: {gap}"


HYBRID = {
    "local": LocalSGD(3, within=2),
    "diloco": DiLoCo(4, within=2),
    "streaming-int4": DiLoCo(4, fragments=2, overlap=1, wire="int4", within=2),
    "one-part": DiLoCo(3, within=4),
}


@pytest.mark.slow(but=("streaming-int4",))
@pytest.mark.parametrize("name", HYBRID)
def test_parts_average_gradients_within_and_parameters_between(name):
    for found, wanted in run_ranks(beside_torch, 4, HYBRID[name], "adamw"):
        for step, (ours, its) in enumerate(zip(found, wanted, strict=True), start=1):
            gap = max((a - b).abs().max().item() for a, b in zip(ours, its, strict=True))
            assert all(map(torch.equal, ours, its)), f"step {step}: {gap}"
