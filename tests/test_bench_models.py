"""The models of the benchmarks: true sizes are the published ones, small ones train."""

import pytest
import torch

from bench.models import WORKLOADS

# Parameters and tensors as published, or as the description of a model says.
TRUE_SIZES = {
    "small": (1_664_000, 800),
    "wide": (25_178_112, 12),
    "deep": (32 * 1536 * 1537, 64),
    "resnet50": (25_557_032, 161),
    "gpt2": (124_439_808, 148),
    "llama_layer": (218_112_000, 9),
    "ops400": (428_800, 400),
    "paced": (25_165_824, 24),
}


@pytest.mark.parametrize("name", TRUE_SIZES)
def test_true_sizes(name):
    with torch.device("meta"):
        parameters = list(WORKLOADS[name](scale=1.0).build().parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == TRUE_SIZES[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_repeat_themselves_and_use_every_parameter(name):
    workload = WORKLOADS[name](scale=0.002)
    losses = []
    for _ in range(2):
        module = workload.build()
        loss = workload.loss(module(workload.batch(0, 0)))
        loss.backward()
        assert all(p.grad is not None for p in module.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert not torch.equal(workload.batch(0, 0), workload.batch(1, 0)), "ranks see other data"


@pytest.mark.parametrize("name", WORKLOADS)
def test_scale_shrinks_models(name):
    def size(scale):
        with torch.device("meta"):
            return sum(p.numel() for p in WORKLOADS[name](scale=scale).build().parameters())

    assert 0.1 < size(0.25) / size(1.0) < 0.5
