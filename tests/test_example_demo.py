"""examples/demo.py, its three parts at their smallest; CI runs the whole command."""

import math

import pytest
import torch

from examples import data, demo
from examples.common.ranks import Group
from examples.common.rounds import Settings
from examples.common.variants import select
from fastsync.testing import run_ranks


def parts(rank, world):
    demo.PARITY_STEPS = 4
    group, corpus = Group(rank, world, torch.device("cpu")), data.load()
    short = Settings(rounds=1, steps=1, warmup=1, check_steps=2, optimizer="adamw")
    workload = demo.gpt_workload(corpus)
    losses = demo.train_gpt(corpus, 10, group)
    hashes = demo.check_parity(workload, group)
    variants = select("no_sync,ddp,fastsync").variants
    timings, costs = demo.measure_gpt(workload, variants, short, group)
    return losses, hashes, [timing.check for timing in timings], costs


@pytest.mark.slow
def test_the_demo_trains_compares_and_measures():
    (losses, hashes, checks, costs), other = run_ranks(parts, 2, timeout=240)
    assert len(losses) == 10 and losses[0] < math.log(256) + 0.1
    assert losses[-1] < losses[0] - 0.2
    for optimizer in ("adamw", "sgd"):
        assert hashes[optimizer]["ddp"] == hashes[optimizer]["fastsync"]
        assert hashes[optimizer] == other[1][optimizer]
    assert len(checks) == 3
    for ours, theirs in zip(costs["fastsync"], costs["ddp"], strict=True):
        assert ours < theirs
