"""A whole step, captured into a CUDA graph and replayed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from fastsync import FastDDP, Wire
from tests.helpers import models
from tests.helpers.devices import needs_gpu, run_cuda_ranks
from tests.helpers.models import batch, build, loss_of

pytestmark = needs_gpu
WARMUP = 11  # eager steps before a capture, as torch asks for under DDP
REPLAYS = 4


def step_of(model, inputs):
    model.zero_grad(set_to_none=True)
    loss_of(model(inputs)).backward()


def wrap(wire, module=None):
    """`wire`: a wire, or a function that registers a communication hook."""
    module = (build("wide") if module is None else module).cuda()
    if not callable(wire):
        return FastDDP(module, wire=wire)
    model = FastDDP(module)
    wire(model)
    return model


def hooked(model):
    model.register_comm_hook(None, fp16_compress_hook)


def eager(rank, steps, wire):
    """The averages of each step, without a graph."""
    model = wrap(wire)
    found = []
    for step in steps:
        step_of(model, batch("wide", 100 * step + rank).cuda())
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def captured(rank, world, wire):
    """Return whether each replay leaves the averages of the step whose inputs it was given."""
    expected = eager(rank, range(WARMUP + REPLAYS), wire)[-REPLAYS:]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = wrap(wire)
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


@pytest.mark.slow(but=("int8-1",))
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_replays_average_their_own_inputs(world, wire):
    for found in run_cuda_ranks(captured, world, wire):
        assert found == [True] * REPLAYS


def captured_only(rank, world, wire):
    """Only that it works: replays begin with another residual than the eager steps."""
    assert len(captured(rank, world, wire)) == REPLAYS


WAYS = {
    "hook": hooked,
    "gather": Wire("int8", form="gather"),
    "pieces": Wire("int8", form="two_shot", piece_bytes=65536),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_can_be_captured(way):
    """Nothing copies from pageable memory, which a capture refuses."""
    run_cuda_ranks(captured_only, 2, WAYS[way])


def on_nodes(rank, world, check):
    """Two ranks are a node."""
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = {"node_group": nodes[rank // 2], "cross_group": across[rank % 2]}
    check(rank, world, Wire("int8", form="hierarchical", **groups))


@pytest.mark.parametrize("check", ["captured_only", "changing_flags"])
def test_the_hierarchical_form_neither_waits_nor_refuses_a_capture(check):
    run_cuda_ranks(on_nodes, 4, globals()[check])


def changing_flags(rank, world, wire):
    """Miss gradients on a rank in one step, so that its flags change back in the next: no wait
    follows.
    """
    torch.manual_seed(0)
    model = wrap(wire, models.Skipping(2, 256))
    inputs = batch("wide", rank).cuda()

    def step(both):
        model.zero_grad(set_to_none=True)
        loss_of(model(inputs, both)).backward()

    for number in range(WARMUP + 1):
        step(both=rank == 0 or number != WARMUP)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(both=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", WAYS)
def test_no_step_waits_because_flags_change(way):
    run_cuda_ranks(changing_flags, 2, WAYS[way])


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
