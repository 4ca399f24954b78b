"""Mixture of experts: each expert is averaged over the ranks that have it, the rest over all.

    python -m examples.experts --ranks 4

Ranks 0 and 1 share two experts and exchange tokens; ranks 2 and 3 do so with the same two, and so
on. Trains a byte-level model four ways: one process with both experts and the lines of all ranks,
`FastDDP(groups=...)`, `fully_shard` with a mesh for the experts, and FastDDP alone, which takes
both experts for one. Exits with 1 unless the second and the third end where one process does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fastsync
from examples import data
from examples.common.ranks import Group, Parser, UsageError, argument, launch, whole

EXPERTS, WIDTH, LENGTH = 2, 32, 256
SAME = 1e-3  # weights this close, relative to how far they have moved, are the same
ALONE, GROUPS, SHARDS, PLAIN = "one process", "FastDDP, groups", "fully_shard", "FastDDP alone"


class Model(nn.Module):
    """Predicts a byte from the one before it. The byte chooses the expert.

    Args:
        own: the experts of this process.
        pair: ranks that have all experts together; None: this process has all.
    """

    def __init__(self, own: list[int], pair: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(data.VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, data.VOCABULARY)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.experts = nn.ModuleList(experts[number] for number in own)
        self.pair = pair

    def forward(self, tokens: Tensor) -> Tensor:
        order = torch.argsort(tokens % EXPERTS, stable=True)
        sizes = torch.bincount(tokens % EXPERTS, minlength=EXPERTS).tolist()
        rows = self.embedding(tokens[order])
        rows = rows + (self._here(rows, sizes) if self.pair is None else self._sent(rows, sizes))
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        logits: Tensor = self.head(rows[back])
        return logits

    def _here(self, rows: Tensor, sizes: list[int]) -> Tensor:
        parts = zip(self.experts, rows.split(sizes), strict=True)
        return torch.cat([expert(part) for expert, part in parts])

    def _sent(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """Send each row to the rank of its expert, and back."""
        counts = torch.tensor(sizes, device=rows.device)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.pair)
        come = theirs.tolist()
        mine = Exchange.apply(rows, come, sizes, self.pair)
        outputs: Tensor = Exchange.apply(self.experts[0](mine), sizes, come, self.pair)
        return outputs


class Exchange(torch.autograd.Function):
    """Exchange rows with the ranks of a group; in backward, their gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (sent, received, group)
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = Exchange.apply(gradients[0], *ctx.back)
        return gradient, None, None, None


def batch(rank: int, step: int, world: int) -> tuple[Tensor, Tensor]:
    """Return bytes of a rank, and the byte that follows each."""
    text = data.load().train
    generator = torch.Generator().manual_seed(step * world + rank)
    first = int(torch.randint(len(text) - LENGTH - 1, (1,), generator=generator))
    return text[first : first + LENGTH].long(), text[first + 1 : first + LENGTH + 1].long()


def with_groups(net: Model, same: dist.ProcessGroup) -> nn.Module:
    experts = fastsync.Group(same, divisor=dist.get_world_size())
    return fastsync.FastDDP(net, groups={"experts.*": experts})


def sharded(net: Model, same: dist.ProcessGroup) -> nn.Module:
    device = next(net.parameters()).device.type
    fastsync.fully_shard(net.experts[0], mesh=DeviceMesh.from_group(same, device))
    net.experts[0].set_gradient_divide_factor(dist.get_world_size())  # type: ignore[operator]
    fastsync.fully_shard(net, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    return net


def weights(net: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters by name. Collective where they are sharded."""
    named = ((name, param.detach()) for name, param in net.named_parameters())
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for n, p in named}


def train(net: Model, model: nn.Module, ranks: list[int], steps: int, world: int) -> None:
    """Train on the lines of some ranks, whose losses are means."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    device = next(net.parameters()).device
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            inputs, targets = (each.to(device) for each in batch(rank, step, world))
            (F.cross_entropy(model(inputs), targets) / len(ranks)).backward()
        optimizer.step()


def distance(net: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Return how far weights are away, relative to how far they should have moved."""
    away = sum(float((net[name] - wanted[name]).square().sum()) for name in net)
    moved = sum(float((start[name] - wanted[name]).square().sum()) for name in net)
    return math.sqrt(away / moved)


def run(steps: int, group: Group) -> int:
    if group.world % EXPERTS:
        raise UsageError(
            f"each expert needs as many ranks: --ranks has to be even, not {group.world}"
        )
    pairs = [list(range(r, r + EXPERTS)) for r in range(0, group.world, EXPERTS)]
    alike = [list(range(number, group.world, EXPERTS)) for number in range(EXPERTS)]
    pair, same = (dist.new_subgroups_by_enumeration(each)[0] for each in (pairs, alike))
    number = group.rank % EXPERTS
    ways: dict[str, Callable[[Model], nn.Module]] = {
        GROUPS: lambda net: with_groups(net, same),
        SHARDS: lambda net: sharded(net, same),
        PLAIN: fastsync.FastDDP,
    }
    alone = Model(list(range(EXPERTS)), None).to(group.device)
    start = weights(alone)
    train(alone, alone, list(range(group.world)), steps, group.world)
    wanted, held = weights(alone), f"experts.{number}."
    away = {}
    for way, wrap in ways.items():
        net = Model([number], pair).to(group.device)
        train(net, wrap(net), [group.rank], steps, group.world)
        found = {n.replace("experts.0.", held): value for n, value in weights(net).items()}
        away[way] = group.most(distance(found, wanted, start))
        if group.is_main:
            print(f"{way:16} weights {away[way]:.1e} away from {ALONE}", flush=True)
    return int(not max(away[GROUPS], away[SHARDS]) < SAME < away[PLAIN])


def begin(args: argparse.Namespace) -> int:
    return launch(partial(run, args.steps), args.ranks)


if __name__ == "__main__":
    ranks = argument("--ranks", "processes to start", 4, type=whole)
    steps = argument("--steps", "of training", 50, type=whole)
    raise SystemExit(Parser("examples.experts", __doc__, ranks, steps).run(begin))
