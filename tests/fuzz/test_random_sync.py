"""Random modes, wires, models, checkpoints and ends of rounds, held against plain torch.

One case again: python -m tests.fuzz.test_random_sync --case N
"""

import argparse
import io
import os
import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsync import ChunkedTopK, Delayed, DiLoCo, FastDDP, LocalSGD, TopK
from fastsync.sync.schedule import cut
from tests.helpers.teams import end, run_ranks
from tests.sync import oracle
from tests.sync.test_modes import groups_of

FIXED = 60
DRAWN = 4
SHAPES = [(), (1,), (3,), (5, 4), (2, 3, 4), (65,), (17, 16), (200,), (0, 3), (4200,)]
WIRES = [
    *("fp32", "fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", TopK(0.05), TopK(0.5)),
    *(ChunkedTopK(0.001), ChunkedTopK(1 / 64)),
]


class Parameters(nn.Module):
    """Parameters of any shapes; one may be without a gradient."""

    def __init__(self, shapes, unused, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator) for shape in shapes)
        self.parts = nn.ParameterList([nn.Parameter(values) for values in drawn])
        self.unused = unused

    def forward(self, x):
        used = [p for i, p in enumerate(self.parts) if i != self.unused]
        return sum(((p + x * (i + 1)).tanh() * p).sum() for i, p in enumerate(used))


def drawn_mode(rng):
    every = rng.randint(1, 6)
    kind = rng.choice(["local", "diloco", "diloco", "diloco", "delayed"])
    if kind == "local":
        return LocalSGD(every, warmup=rng.choice([0, 0, 3]))
    if kind == "delayed":
        return Delayed(rng.randint(1, 3))
    return DiLoCo(
        every,
        outer_lr=rng.choice([0.3, 0.7, 1.0]),
        outer_momentum=rng.choice([0.0, 0.9]),
        fragments=rng.randint(1, every),
        overlap=rng.randrange(every),
        wire=rng.choice(WIRES),
        alpha=rng.choice([None, 0.0, 0.3]),
    )


def drawn(number):
    """Return the case of a number: what it trains, how, and what happens when."""
    rng = random.Random(number)
    steps = rng.randint(4, 16)
    count = rng.randint(1, 7)
    world, mode = rng.choice([2, 2, 3]), drawn_mode(rng)
    in_parts = random.Random(f"parts {number}").random() < 0.2
    if in_parts and not isinstance(mode, Delayed) and not mode.warmup:
        world, mode = 4, replace(mode, within=2)
    return {
        "world": world,
        "mode": mode,
        "steps": steps,
        "shapes": [rng.choice(SHAPES) for _ in range(count - 1)] + [(4, 4)],
        "unused": rng.choice([None, None, 0]) if count > 1 else None,
        "adam": rng.random() < 0.5,
        "ends": [step for step in range(1, steps + 1) if rng.random() < 0.15],
        "saves": [step for step in range(1, steps + 1) if rng.random() < 0.15],
        "seed": number,
    }


def optimizer_of(case, params):
    if case["adam"]:
        return torch.optim.AdamW(params, 0.05)
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def loss_of(model, case, rank, step):
    generator = torch.Generator().manual_seed(case["seed"] + 31 * step + rank)
    return model(torch.randn((), generator=generator))


def by_fastsync(rank, case):
    def build():
        module = Parameters(case["shapes"], case["unused"], case["seed"])
        model = FastDDP(module, sync=case["mode"])
        return model, optimizer_of(case, model.parameters())

    (model, optimizer), history = build(), []
    for step in range(1, case["steps"] + 1):
        optimizer.zero_grad()
        loss_of(model, case, rank, step).backward()
        optimizer.step()
        if step in case["ends"]:
            model.end_round()
        if step in case["saves"]:
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


def by_torch(rank, case):
    module = Parameters(case["shapes"], case["unused"], case["seed"])
    params = list(module.parameters())
    optimizer = optimizer_of(case, params)
    steps, mode = iter(range(1, case["steps"] + 1)), case["mode"]
    inside, across = groups_of(rank, case["world"], mode.part_size)

    def local_step(averaged):
        optimizer.zero_grad()
        loss_of(module, case, rank, next(steps)).backward()
        if averaged or mode.part_size > 1:
            for p in (p for p in params if p.grad is not None):
                rows = oracle.everyones(p.grad * (1 / dist.get_world_size(inside)), inside)
                p.grad = sum(rows[1:], rows[0])
        optimizer.step()

    cuts = cut([p.numel() for p in params], getattr(mode, "fragments", 1))
    return oracle.train(mode, params, cuts, local_step, case["steps"], case["ends"], across)


def both(rank, world, case):
    return by_fastsync(rank, case), by_torch(rank, case)


def check(number):
    case = drawn(number)
    for rank, (found, wanted) in enumerate(run_ranks(both, case["world"], case)):
        for step, (ours, its) in enumerate(zip(found, wanted, strict=True), start=1):
            same = all(map(torch.equal, ours, its))
            assert same, f"case {number}, rank {rank}, step {step}: {case}"


def test_cases_of_this_run():
    """Other ones each time; a failure says how to repeat it."""
    start = int.from_bytes(os.urandom(4), "big")
    for number in range(start, start + DRAWN):
        check(number)


@pytest.mark.slow
def test_fixed_cases():
    for number in range(FIXED):
        check(number)


def main():
    parser = argparse.ArgumentParser(description="runs random cases, one or for some time")
    parser.add_argument("--case", type=int, help="run this one only")
    parser.add_argument("--start", type=int, default=FIXED, help="the first one")
    parser.add_argument("--seconds", type=float, default=60, help="begin no more after this long")
    args = parser.parse_args()
    until, number = time.monotonic() + args.seconds, args.start
    if args.case is not None:
        check(args.case)
        number = args.case + 1
    while args.case is None and time.monotonic() < until:
        check(number)
        number += 1
    end()
    print(f"{number - (args.start if args.case is None else args.case)} cases, up to {number - 1}")


if __name__ == "__main__":
    main()
