"""Padded sequences: the mean over all tokens, which DDP's mean over ranks is not.

    python -m examples.padded --ranks 2

Lines of text are padded to one length, and as with batches by length each rank draws shorter ones
than the next. So ranks have different numbers of tokens, and the mean of their means counts tokens
of short lines for more. Trains a table of bigrams three ways: one process with the lines of all
ranks, FastDDP with `add_weight`, and torch's DDP. Exits with 1 unless FastDDP ends where one
process does.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples import data
from examples.common.ranks import Group, Parser, argument, launch, whole
from fastsync import FastDDP

LONGEST, LINES, PADDING = 64, 32, -100
SAME = 1e-3  # weights this close, relative to how far they have moved, are the same


def bigrams() -> nn.Module:
    """Return a model that predicts a byte from the one before it."""
    torch.manual_seed(0)
    return nn.Embedding(data.VOCABULARY, data.VOCABULARY)


def read_lines() -> list[Tensor]:
    """Return lines of the corpus that fit, the shortest first."""
    text = bytes(data.load().train[:2_000_000].tolist())
    lines = (line.strip() for line in text.split(b"\n"))
    kept = sorted((line for line in lines if 2 <= len(line) <= LONGEST), key=len)
    return [torch.tensor(list(line)) for line in kept]


def batch(lines: list[Tensor], rank: int, world: int, step: int) -> tuple[Tensor, Tensor]:
    """Return lines of this rank's lengths and, padded, the byte that follows each byte."""
    generator = torch.Generator().manual_seed(step * world + rank)
    each = len(lines) // world
    chosen = torch.randint(rank * each, (rank + 1) * each, (LINES,), generator=generator)
    picked = [lines[i] for i in chosen.tolist()]
    padded = nn.utils.rnn.pad_sequence(picked, batch_first=True, padding_value=PADDING)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = model(inputs).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction=reduction)


def train(way: str, lines: list[Tensor], steps: int, group: Group) -> nn.Module:
    """Return the trained model."""
    net = bigrams()
    wrapper = {"FastDDP": FastDDP, "DDP": DistributedDataParallel}.get(way)
    model = net if wrapper is None else wrapper(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        if way == "one process":
            all_ranks = [batch(lines, r, group.world, step) for r in range(group.world)]
            total = sum(int((targets != PADDING).sum()) for _, targets in all_ranks)
            for each in all_ranks:
                (loss_of(net, *each, "sum") / total).backward()
        else:
            inputs, targets = batch(lines, group.rank, group.world, step)
            if isinstance(model, FastDDP):
                loss = loss_of(model, inputs, targets, "sum")
                model.add_weight(int((targets != PADDING).sum()))
            else:
                loss = loss_of(model, inputs, targets, "mean")
            loss.backward()
        optimizer.step()
    return net


def flat(net: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def run(steps: int, group: Group) -> int:
    lines = read_lines()
    start = flat(bigrams())
    ways = ("one process", "FastDDP", "DDP")
    nets = {way: train(way, lines, steps, group) for way in ways}
    wanted = flat(nets["one process"])
    away = {w: float((flat(n) - wanted).norm() / (wanted - start).norm()) for w, n in nets.items()}
    if group.is_main:
        places = [(rank, -1 - i) for rank in range(group.world) for i in range(20)]
        held_out = [batch(lines, rank, group.world, step) for rank, step in places]
        tokens = sum(int((targets != PADDING).sum()) for _, targets in held_out)
        for way, net in nets.items():
            with torch.no_grad():
                loss = sum(float(loss_of(net, *each, "sum")) for each in held_out) / tokens
            print(f"{way:12} loss per token {loss:.4f}, weights {away[way]:.1e} away", flush=True)
    return int(not away["FastDDP"] < SAME < away["DDP"])


def start(args: argparse.Namespace) -> int:
    return launch(partial(run, args.steps), args.ranks)


if __name__ == "__main__":
    ranks = argument("--ranks", "processes to start", 2, type=whole)
    steps = argument("--steps", "of training", 200, type=whole)
    raise SystemExit(Parser("examples.padded", __doc__, ranks, steps).run(start))
