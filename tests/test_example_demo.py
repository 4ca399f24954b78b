"""examples/demo.py, its three parts at their smallest; CI runs the whole command."""

import math

import pytest
import torch

from examples import data, demo
from examples.common.ranks import Group
from examples.common.rounds import Settings
from examples.common.variants import select
from fastsync.testing import run_ranks


def parts(rank, world, out):
    demo.PARITY_STEPS = 4
    group, corpus = Group(rank, world, torch.device("cpu")), data.load()
    short = Settings(rounds=1, steps=1, warmup=1, check_steps=2, optimizer="adamw")
    plan = demo.Plan(steps=10, settings=short)
    workload = demo.gpt_workload(corpus)
    history = demo.train_gpt(corpus, plan, group, out)
    hashes = demo.check_parity(workload, group)
    selection = select("no_sync,ddp,fastsync")
    timings, costs = demo.measure_gpt(workload, selection, plan, group)
    return history, hashes, [timing.check for timing in timings], costs


@pytest.mark.slow
def test_the_demo_trains_compares_and_measures(tmp_path):
    (history, hashes, checks, costs), other = run_ranks(parts, 2, tmp_path, timeout=240)
    assert history["losses"][0] < math.log(256) + 0.1
    assert history["losses"][-1] < history["losses"][0] - 0.2
    for optimizer in ("adamw", "sgd"):
        assert hashes[optimizer]["ddp"] == hashes[optimizer]["fastsync"]
        assert hashes[optimizer] == other[1][optimizer]
    assert len(checks) == 3
    assert costs["fastsync"].ops < costs["ddp"].ops
    assert costs["fastsync"].memory < costs["ddp"].memory
