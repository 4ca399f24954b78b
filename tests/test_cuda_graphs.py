"""A whole step, captured into a CUDA graph and replayed."""

import pytest
import torch

from fastsync import FastDDP
from tests import models
from tests.devices import needs_gpu, run_cuda_ranks
from tests.models import batch, build, loss_of

pytestmark = needs_gpu
WARMUP = 11  # eager steps before a capture, as torch asks for under DDP
REPLAYS = 4


def step_of(model, inputs):
    model.zero_grad(set_to_none=True)
    loss_of(model(inputs)).backward()


def eager(rank, steps, wire):
    """The averages of each step, without a graph."""
    model = FastDDP(build("wide").cuda(), wire=wire)
    found = []
    for step in steps:
        step_of(model, batch("wide", 100 * step + rank).cuda())
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def captured(rank, world, wire):
    """Whether each replay leaves the averages of the step whose inputs it was given."""
    expected = eager(rank, range(WARMUP + REPLAYS), wire)[-REPLAYS:]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = FastDDP(build("wide").cuda(), wire=wire)
        inputs = batch("wide", rank).cuda()
        for _ in range(WARMUP):
            step_of(model, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    steps = model.sync_stats().steps
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step_of(model, inputs)
    found = []
    for replay, wanted in enumerate(expected):
        inputs.copy_(batch("wide", 100 * (WARMUP + replay) + rank).cuda())
        graph.replay()
        torch.cuda.synchronize()
        same = [torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True)]
        found.append(all(same))
    assert model.sync_stats().steps == steps + 1
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_replays_average_their_own_inputs(world, wire):
    for found in run_cuda_ranks(captured, world, wire):
        assert found == [True] * REPLAYS


def capture_too_early(rank, world):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = FastDDP(models.wide().cuda())
        inputs = batch("wide", rank).cuda()
    torch.cuda.synchronize()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream)
    with pytest.raises(RuntimeError, match="train a few steps first"), capture:
        step_of(model, inputs)


def test_a_capture_before_the_plan_is_refused():
    run_cuda_ranks(capture_too_early, 1)
