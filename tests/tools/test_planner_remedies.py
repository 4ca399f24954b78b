"""Remedies where nothing fits: the change that a plan names makes it fit."""

import re
from dataclasses import replace

import pytest
import torch

from fastsync.planner.advice import MOST_GPUS, advise
from fastsync.planner.formulas import adam_by_formula, transformer_of
from fastsync.planner.hardware import Cluster, Link, device_named
from fastsync.planner.scenario import Scenario, cached_optimizer

CLUSTER = Cluster(8, 8, Link(450e9, None, "nvlink", 0.82), Link(50e9, None, "net", 0.92))


def asked(
    memory,
    samples=4,
    kinds=("0", "1", "2", "3", "hsdp"),
    checkpointing=(False, True),
    tokens=1024,
):
    def trace(batch, again):
        return transformer_of(10**9, torch.bfloat16, (batch, tokens), again)

    return Scenario(
        trace,
        samples,
        cached_optimizer(adam_by_formula),
        replace(device_named("h100"), memory=memory, framework=0.0),
        CLUSTER,
        kinds,
        checkpointing=checkpointing,
    )


def told(scenario):
    """The remedy, and the least that is needed without it."""
    candidates = [scenario.candidate(strategy) for strategy in scenario.strategies(8)]
    assert not any(candidate.fits for candidate in candidates)
    advice = advise(candidates, scenario)
    assert advice.best is None and advice.reasons[0].startswith("Nothing fits: ")
    (sentence,) = advice.reasons[1:]
    return sentence, min(candidate.memory.total for candidate in candidates)


def planned(scenario, name, world=8, samples=None, accumulate=1):
    """Bytes at the peak of what the sentence names."""
    wider = replace(
        scenario,
        samples=samples or scenario.samples,
        kinds=("0", "1", "2", "3", "hsdp"),
        checkpointing=(False, True),
        accumulate=accumulate,
    )
    strategy = next(s for s in wider.strategies(world) if s.name == name)
    return wider.memory(strategy).total


@pytest.mark.slow(but=("14000000000.0-kinds2",))
@pytest.mark.parametrize(
    ("memory", "kinds"), [(6e9, ("0", "1", "2", "3")), (9e9, ("1",)), (14e9, ("0",))]
)
def test_the_batch_that_is_named_fits(memory, kinds):
    """Also with gradients of several backwards, as stage 1 keeps them besides."""
    scenario = asked(memory, 512, kinds)
    sentence, _ = told(scenario)
    found = re.match(r"Change the batch first: (.*) fits with (\d+) samples? per GPU", sentence)
    name, samples = found[1], int(found[2])
    assert planned(scenario, name, samples=samples, accumulate=4) <= memory
    assert planned(scenario, name, samples=samples + 1, accumulate=4) > memory


@pytest.mark.parametrize(
    "options", [{"kinds": ("0",)}, {"kinds": ("3",), "checkpointing": (False,), "samples": 4}]
)
def test_the_strategy_that_is_named_fits(options):
    memory = 11e9 if "samples" not in options else 3e9
    scenario = asked(memory, **options)
    sentence, _ = told(scenario)
    name = re.match(r"Change the strategy first: (.*) fits, in", sentence)[1]
    assert planned(scenario, name) <= memory


def test_the_strategy_and_the_batch_that_are_named_fit():
    scenario = asked(6e9, samples=512, kinds=("0",))
    sentence, _ = told(scenario)
    found = re.match(
        r"Change the strategy and the batch first: (.*) fits with (\d+) samples? per", sentence
    )
    assert planned(scenario, found[1], samples=int(found[2]), accumulate=2) <= 6e9


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
    assert sentence.startswith("Shorten the sequences or shrink the model first")
    assert sentence.endswith("of it activations.")


def test_more_gpus_are_no_remedy_for_what_each_of_them_repeats():
    """Not even 16,384 hold less each of what zero=0 repeats."""
    sentence, _ = told(asked(11e9, kinds=("0",)))
    assert "number of GPUs" not in sentence
