"""The largest batch that a plan states fits, and one sample more does not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fastsync.planner.formulas import adam_by_formula, transformer_of
from fastsync.planner.hardware import Cluster, Link, device_named
from fastsync.planner.scenario import Scenario, cached_optimizer
from fastsync.planner.trace import trace_model, trace_optimizer

CLUSTER = Cluster(8, 4, Link(450e9, None, "nvlink", 0.82), Link(50e9, None, "net", 0.92))


def asked(trace, memory, optimizer=adam_by_formula, samples=2):
    """A scenario that counts its traces."""
    made = []

    def counted(samples, checkpointing):
        made.append((samples, checkpointing))
        return trace(samples, checkpointing)

    device = replace(device_named("h100"), memory=memory, framework=0.0)
    return Scenario(counted, samples, cached_optimizer(optimizer), device, CLUSTER), made


def peaks(scenario, strategy, samples):
    return replace(scenario, samples=samples).memory(strategy).total


def assert_largest(scenario, strategy, limit, found):
    assert found == 0 or peaks(scenario, strategy, found) <= limit, strategy.name
    assert peaks(scenario, strategy, found + 1) > limit, strategy.name


@pytest.mark.slow(but=("4000000000.0-1",))
@pytest.mark.parametrize("memory, samples", [(80e9, 2), (80e9, 600), (21e9, 3), (4e9, 1)])
def test_it_is_the_largest_whichever_moment_of_the_step_is(memory, samples):
    def trace(batch, checkpointing):
        return transformer_of(10**9, torch.bfloat16, (batch, 2048), checkpointing)

    scenario, made = asked(trace, memory, samples=samples)
    scenario = replace(scenario, masters=True)
    found = {s: scenario.candidate(s).largest_batch for s in scenario.strategies(8)}
    assert len(found) == 10
    assert len(made) <= 3 * len(found), "traces are few"
    assert any(found.values()) or memory == 4e9
    for strategy, largest in found.items():
        assert_largest(scenario, strategy, memory, largest)


class Pairs(nn.Module):
    """Compares each sample with each other one, so that memory grows with the batch's square."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        each = self.layer(x)
        return (each @ each.T).softmax(-1).square().mean()


class Moody(Pairs):
    """Does more with large batches, and keeps what it does."""

    def forward(self, x):
        each = self.layer(x)
        return (each.exp().sin() if len(x) > 40 else each).square().mean()


@pytest.mark.slow(but=("Moody-100000.0",))
@pytest.mark.parametrize("kind, memory", [(Pairs, 4e6), (Moody, 3e5), (Moody, 1e5), (Moody, 8e5)])
def test_it_is_the_largest_where_memory_does_not_grow_along_a_line(kind, memory):
    scenario, made = asked(
        lambda samples, _: trace_model(kind, (samples, 64)),
        memory,
        lambda shapes: trace_optimizer("adamw", shapes, True),
    )
    strategy = next(scenario.strategies(8))
    found = scenario.candidate(strategy).largest_batch
    assert found > 2
    assert len(made) <= 14, "it ends"
    assert_largest(scenario, strategy, memory, found)


def test_what_never_follows_from_traces_ends_with_what_was_seen_to_fit():
    """No two batches of this model do the same things."""

    def trace(samples, checkpointing):
        record = transformer_of(10**6, torch.bfloat16, (samples, 64))
        return replace(record, marks=(*record.marks, *record.marks[:samples]))

    scenario, made = asked(trace, 1e9)
    strategy = next(scenario.strategies(8))
    found = scenario.candidate(strategy).largest_batch
    assert len(made) <= 14
    assert found in {samples for samples, _ in made}
    assert peaks(scenario, strategy, found) <= 1e9


def test_a_search_ends_where_memory_does_not_grow():
    """The search ends where memory does not grow."""

    def trace(samples, checkpointing):
        return replace(transformer_of(10**6, torch.bfloat16, (1, 1)), samples=samples)

    scenario, _ = asked(trace, 1e9)
    assert scenario.candidate(next(scenario.strategies(8))).largest_batch > 1e5
