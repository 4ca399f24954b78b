"""Remedies where nothing fits: the change that a plan names makes it fit."""

import re
from dataclasses import replace

import pytest
import torch

from fastsync.planner.formulas import adam_by_formula, transformer_of
from fastsync.planner.hardware import Cluster, Link, device_named
from fastsync.planner.plan import MOST_GPUS, advise
from fastsync.planner.scenario import Scenario, cached_optimizer

CLUSTER = Cluster(8, 8, Link(450e9, None, "nvlink", 0.82), Link(50e9, None, "net", 0.92))


def asked(memory, samples=4, tokens=1024):
    def trace(batch, again):
        return transformer_of(10**9, torch.bfloat16, (batch, tokens), again)

    return Scenario(
        trace,
        samples,
        cached_optimizer(adam_by_formula),
        replace(device_named("h100"), memory=memory, framework=0.0),
        CLUSTER,
    )


def told(scenario):
    """The remedy, and the least that is needed without it."""
    candidates = [scenario.candidate(strategy) for strategy in scenario.strategies(8)]
    assert not any(candidate.fits for candidate in candidates)
    best, text = advise(candidates, scenario)
    nothing, sentence = text.splitlines()
    assert best is None and nothing.startswith("Nothing fits: ")
    return sentence, min(candidate.memory.total for candidate in candidates)


def planned(scenario, name, world=8, samples=None, accumulate=1):
    """Bytes at the peak of what the sentence names."""
    other = replace(scenario, samples=samples or scenario.samples, accumulate=accumulate)
    strategy = next(s for s in other.strategies(world) if s.name == name)
    return other.memory(strategy).total


@pytest.mark.slow(but=("6000000000.0",))
@pytest.mark.parametrize("memory", [6e9, 14e9])
def test_the_batch_that_is_named_fits(memory):
    """Also with gradients of several backwards, as stage 1 keeps them besides."""
    scenario = asked(memory, 2048)
    sentence, _ = told(scenario)
    found = re.match(r"Change the batch first: (.*) fits with (\d+) samples? per GPU", sentence)
    name, samples = found[1], int(found[2])
    assert planned(scenario, name, samples=samples, accumulate=4) <= memory
    assert planned(scenario, name, samples=samples + 1, accumulate=4) > memory


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("samples", [1, 64])
def test_the_number_of_gpus_that_is_named_fits(samples):
    memory = 1.2e9
    scenario = asked(memory, samples)
    sentence, least = told(scenario)
    found = re.match(
        r"Change the number of GPUs first: on (\d+), (.*) fits with (\d+) samples? per GPU",
        sentence,
    )
    world, name, each = int(found[1]), found[2], int(found[3])
    assert world > 8
    assert planned(scenario, name, world, each) <= memory < least
    assert planned(scenario, name, world // 2, each) > memory, "fewer do not"


def test_where_nothing_helps_it_is_said_how_near_it_comes():
    memory = 1e7
    scenario = asked(memory)
    sentence, least = told(scenario)
    found = re.search(r"on (\d+) GPUs, too, (.*) with 1 sample needs ([\d.]+) MB", sentence)
    assert int(found[1]) == MOST_GPUS
    nearer = planned(scenario, found[2], MOST_GPUS, 1)
    assert memory < nearer < least
    assert nearer == pytest.approx(float(found[3]) * 1e6, rel=1e-3)


def test_one_sample_may_be_too_much():
    sentence, _ = told(asked(2e9, samples=2, tokens=10**6))
    assert sentence.endswith("of it activations.")
