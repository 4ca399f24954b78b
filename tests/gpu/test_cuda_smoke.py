"""The shortest look at every part on a GPU: two ranks, one test for each, in a minute and a half.

`bench gpu_all` runs it before anything that measures. Where the weights are compared, the same runs
on CPUs in every test run, so that what fails on a GPU is not the test.
"""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.testing import run_ranks
from tests.gpu import test_cuda_elastic, test_cuda_graphs, test_cuda_offload
from tests.helpers.devices import DEVICES, needs_gpu, run_cuda_ranks
from tests.helpers.models import build, loss_of

STEPS = 4
# How a module is wrapped, and how far weights may be from DDP's after STEPS steps of SGD.
PARTS = {
    "ddp": (lambda module: fastsync.FastDDP(module), 1e-5),
    "int8": (lambda module: fastsync.FastDDP(module, wire="int8"), 1e-2),
    "zero1": (lambda module: fastsync.FastDDP(module, zero=1), 1e-5),
    "zero2": (lambda module: fastsync.FastDDP(module, zero=2), 1e-5),
    "zero3": (lambda module: fastsync.FastDDP(module, zero=3), 1e-5),
    "fully_shard": (lambda module: fastsync.fully_shard(module), 1e-5),
}


def trained(rank, wrap, device):
    model = wrap(build("wide").to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss_of(model(torch.randn(4, 256, generator=generator).to(device))).backward()
        optimizer.step()
    params = (param.detach() for param in model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).cpu() for p in params]


def furthest(rank, world, part, device):
    """Return the largest distance of an element from DDP's weights."""
    wrap, _ = PARTS[part]
    expected = trained(rank, DistributedDataParallel, device)
    found = trained(rank, wrap, device)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.slow("int8-cpu", "zero1-cpu", "zero2-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", PARTS)
def test_weights_are_ddps(part, device):
    run = run_cuda_ranks if device == "cuda" else run_ranks
    for distance in run(furthest, 2, part, device):
        assert distance <= PARTS[part][1]


class TestOnGPUs:
    pytestmark = needs_gpu

    def test_graphs(self):
        for found in run_cuda_ranks(test_cuda_graphs.captured, 2, "fp32"):
            assert all(found)

    def test_offload(self):
        transport = test_cuda_offload.TRANSPORT
        for found in run_cuda_ranks(test_cuda_offload.places, 2, "pinned", transport=transport):
            assert found == ({"cpu"}, {"cuda"}, {True}, {"cuda"})

    def test_a_killed_rank(self, tmp_path):
        cases, both = test_cuda_elastic.NCCL_CASES, test_cuda_elastic.BOTH
        test_cuda_elastic.check_on_gpus(tmp_path, cases, ["two-to-one"], both)
