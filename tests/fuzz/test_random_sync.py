"""Random modes, wires, models, checkpoints and ends of rounds, held against plain torch.

One case again: python -m tests.fuzz.test_random_sync --case N
"""

import argparse
import os
import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fastsync import ChunkedTopK, Delayed, DiLoCo, LocalSGD, TopK
from tests.helpers.teams import end
from tests.sync.test_modes import Training, check

FIXED = 60
DRAWN = 2
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


def loss_of(model, rank, step, seed):
    generator = torch.Generator().manual_seed(seed + 31 * step + rank)
    return model(torch.randn((), generator=generator))


def drawn(number):
    """Return how many ranks a case has, what they train, how, and what happens when."""
    rng = random.Random(number)
    steps = rng.randint(4, 16)
    count = rng.randint(1, 7)
    world, mode = rng.choice([2, 2, 3]), drawn_mode(rng)
    if isinstance(mode, DiLoCo) and random.Random(f"warmup {number}").random() < 0.2:
        mode = replace(mode, warmup=3)
    parts, zero = random.Random(f"parts {number}"), 0
    if parts.random() < 0.2 and not mode.warmup:
        world, mode, zero = 4, replace(mode, within=2), parts.choice([0, 1, 2])
    shapes = [rng.choice(SHAPES) for _ in range(count - 1)] + [(4, 4)]
    unused = rng.choice([None, None, 0]) if count > 1 else None
    return world, Training(
        mode,
        "adamw" if rng.random() < 0.5 else "sgd",
        steps,
        partial(Parameters, shapes, unused, number),
        partial(loss_of, seed=number),
        ends=[step for step in range(1, steps + 1) if rng.random() < 0.15],
        saves=[step for step in range(1, steps + 1) if rng.random() < 0.15],
        zero=zero,
    )


def test_cases_of_this_run():
    """Other ones each time; a failure says how to repeat it."""
    start = int.from_bytes(os.urandom(4), "big")
    for number in range(start, start + DRAWN):
        print(f"case {number}")
        check(*drawn(number))


@pytest.mark.slow
def test_fixed_cases():
    for number in range(FIXED):
        check(*drawn(number))


def main():
    parser = argparse.ArgumentParser(description="runs random cases, one or for some time")
    parser.add_argument("--case", type=int, help="run this one only")
    parser.add_argument("--start", type=int, default=FIXED, help="the first one")
    parser.add_argument("--seconds", type=float, default=60, help="begin no more after this long")
    args = parser.parse_args()
    until, number = time.monotonic() + args.seconds, args.start
    if args.case is not None:
        check(*drawn(args.case))
        number = args.case + 1
    while args.case is None and time.monotonic() < until:
        check(*drawn(number))
        number += 1
    end()
    print(f"{number - (args.start if args.case is None else args.case)} cases, up to {number - 1}")


if __name__ == "__main__":
    main()
