"""FastDDP on GPUs: the weights of DDP, over NCCL and Gloo, on any stream, with memory reused."""

import os
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastsync import FastDDP, TimelinePolicy
from fastsync.timeline.data import load
from tests.helpers import models
from tests.helpers.devices import TRANSPORTS, needs_gpu, run_cuda_ranks
from tests.helpers.models import batch, build, differences, grads, loss_of, state, wrap

pytestmark = needs_gpu
STEPS = 8


def repeatable():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def train(kind, name, rank, steps=STEPS, accumulate=1, keep=False, between=None, **options):
    """Weights and buffers after `steps` steps; `between` is called after every backward."""
    repeatable()
    model = wrap(kind, build(name).cuda(), **options)
    opt = models.OPTIMIZERS["sgd"](model.parameters())
    for step in range(steps):
        opt.zero_grad(set_to_none=not keep)
        for micro in range(accumulate):
            inputs = batch(name, 1000 * step + 10 * micro + rank).cuda()
            syncs = nullcontext() if micro == accumulate - 1 else model.no_sync()
            with syncs, sdpa_kernel(SDPBackend.MATH):
                loss_of(model(inputs)).backward()
        if between is not None:
            between(model)
        opt.step()
    torch.cuda.synchronize()
    return {name: value.cpu() for name, value in state(model.module).items()}


def close(one, other, limit=1e-5):
    return all(torch.allclose(one[n], other[n], rtol=limit, atol=limit) for n in one)


CASES = [
    *[(name, {}, {"bucket_cap_mb": 0.002}) for name in models.MODELS],
    ("many", {"keep": True}, {}),
    ("wide", {"accumulate": 3}, {}),
    ("many", {}, {"gradient_as_bucket_view": False}),
    ("conv", {}, {"static_graph": True}),
    ("wide", {}, {"find_unused_parameters": False}),
]


def train_both(rank, world):
    found = []
    for name, shared, ours_only in CASES:
        ours = train("fast", name, rank, **shared, **ours_only)
        theirs = train("torch", name, rank, **shared)
        found.append((differences(ours, theirs), close(ours, theirs)))
    return found


@pytest.mark.slow(but=("2-nccl",))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_equal_ddp(world, transport):
    """To the last bit up to two ranks; from three on the order of a sum is the backend's choice."""
    for found in run_cuda_ranks(train_both, world, transport=transport):
        for case, (names, near) in zip(CASES, found, strict=True):
            assert not names if world <= 2 else near, f"{case}: {names}"


def on_side_stream(rank, world, parts):
    """Training on a stream of its own ("stream"), while freed memory is overwritten ("spoil")."""
    with torch.cuda.stream(torch.cuda.Stream()) if "stream" in parts else nullcontext():
        ours = train("fast", "wide", rank, between=spoil if "spoil" in parts else None)
    return differences(ours, train("torch", "wide", rank))


def spoil(model):
    """Make the allocator hand out what has been freed, on two streams, and fill it with NaN."""
    with torch.cuda.stream(torch.cuda.Stream()):
        _fill_what_is_free(model)
    _fill_what_is_free(model)


def _fill_what_is_free(model):
    sizes = [p.numel() for p in model.parameters()]
    taken = [torch.full((n,), torch.nan, device="cuda") for n in [*sizes, sum(sizes)] * 2]
    del taken


@pytest.mark.slow(but=("parts0-2",))
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("parts", [("stream",), ("spoil",), ("stream", "spoil")])
def test_streams_and_memory_that_is_reused(world, parts):
    for names in run_cuda_ranks(on_side_stream, world, parts):
        assert not names


class TwoStreams(nn.Module):
    """The first half of its layers runs on a stream of its own, and so does its backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = models.wide(256, 2), models.wide(256, 2)
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(20_000_000)
            side = self.first(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        side.record_stream(torch.cuda.current_stream())
        return self.second(x) + side


def backward_on_side_streams(rank, world, outside, wire):
    """Averages of a step whose backward runs on several streams, and what they should be."""
    repeatable()
    wanted = []
    for other in range(world):
        torch.manual_seed(0)
        plain = TwoStreams().cuda()
        loss_of(plain(batch("wide", other).cuda())).backward()
        torch.cuda.synchronize()
        wanted.append([p.grad / world for p in plain.parameters()])
    torch.manual_seed(0)
    model = FastDDP(TwoStreams().cuda(), bucket_cap_mb=0.3, wire=wire)
    stream = torch.cuda.Stream()
    kept = []
    for _ in range(3):
        model.zero_grad()
        with torch.cuda.stream(stream) if outside else nullcontext():
            loss = loss_of(model(batch("wide", rank).cuda()))
            loss.backward()
            kept.append([p.grad.clone() for p in model.parameters()])
            spoil(model)
    torch.cuda.synchronize()
    sums = [torch.stack(parts).sum(0) for parts in zip(*wanted, strict=True)]
    return max(
        ((mine - sum_).norm() / sum_.norm()).item()
        for step in kept
        for mine, sum_ in zip(step, sums, strict=True)
    )


@pytest.mark.slow(but=("fp32-1e-05-True",))
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("wire", "limit"), [("fp32", 1e-5), ("int8", 3e-2)])
def test_backward_on_side_streams(wire, limit, outside):
    for error in run_cuda_ranks(backward_on_side_streams, 2, outside, wire):
        assert error < limit


def keep_gradients(rank, world):
    """Gradients of earlier steps, kept by the user, and what they were."""
    model = FastDDP(build("wide").cuda())
    kept, copies = [], []
    for step in range(4):
        model.zero_grad()
        loss_of(model(batch("wide", 10 * step + rank).cuda())).backward()
        kept.append([p.grad for p in model.parameters()])
        copies.append([p.grad.clone() for p in model.parameters()])
        spoil(model)
    return all(
        torch.equal(one, other)
        for step in zip(kept, copies, strict=True)
        for one, other in zip(*step, strict=True)
    )


def test_gradients_that_are_kept_stay():
    assert all(run_cuda_ranks(keep_gradients, 2))


def share_a_gpu(rank, world):
    """Return what two ranks of one host hear that use the same GPU."""
    os.environ.pop("NCCL_HOSTID", None)
    torch.cuda.set_device(0)
    try:
        FastDDP(build("wide").cuda())
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_of_a_host_that_share_a_gpu_are_told_so():
    for found in run_cuda_ranks(share_a_gpu, 2):
        assert "two ranks use the same GPU" in found and "LOCAL_RANK" in found


def unused(rank, world):
    """Use the second layer of rank 1 only in every other step, and the third on no rank."""
    found = []
    for kind, options in (("fast", {}), ("torch", {"find_unused_parameters": True})):
        torch.manual_seed(0)
        model = wrap(kind, models.Skipping(3, 64).cuda(), **options)
        for step in range(6):
            model.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step + rank)).cuda()
            loss_of(model(inputs, rank == 0 or step % 2 == 0)).backward()
            found.append(grads(model))
    half = len(found) // 2
    return [differences(a, b) for a, b in zip(found[:half], found[half:], strict=True)]


@pytest.mark.slow("nccl")
@pytest.mark.filterwarnings("ignore:rank")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unused_parameters(transport):
    for found in run_cuda_ranks(unused, 2, transport=transport):
        assert found == [[]] * 6


def with_hook(rank, world):
    found = []
    for hook in (fp16_compress_hook, bf16_compress_hook):
        results = []
        for kind in ("fast", "torch"):
            torch.manual_seed(0)
            model = wrap(kind, models.wide().cuda())
            model.register_comm_hook(None, hook)
            for step in range(3):
                model.zero_grad()
                loss_of(model(batch("wide", 10 * step + rank).cuda())).backward()
            results.append(grads(model))
        found.append(differences(*results))
    return found


def test_torchs_hooks_over_nccl():
    for found in run_cuda_ranks(with_hook, 2):
        assert found == [[], []]


SKIPPED, RECORDED = 3, 5


def record_timeline(rank, world, path):
    """A window at whose end the device is far behind. The host's clock before and after it."""
    policy = TimelinePolicy(str(path), skip=SKIPPED, steps=RECORDED)
    model = FastDDP(build("wide").cuda(), timeline=policy, bucket_cap_mb=0.3)
    dist.barrier()
    torch.cuda.synchronize()
    before = time.monotonic_ns()
    for step in range(SKIPPED + RECORDED + 1):
        model.zero_grad()
        torch.cuda._sleep(100_000_000)
        loss_of(model(batch("wide", step + rank).cuda())).backward()
    torch.cuda.synchronize()
    return before, time.monotonic_ns()


def test_a_timeline_on_the_device(tmp_path):
    """Every mark of the window is there, in order, and at a time at which the device ran."""
    times = run_cuda_ranks(record_timeline, 2, tmp_path / "run.json")
    run = load(tmp_path / "run.json")
    assert run.world_size == 2 and run.device.startswith("cuda")
    for record, (before, after) in zip(run.ranks, times, strict=True):
        assert (record.dropped, record.unfinished) == (0, 0)
        buckets = len(run.plans[-1])
        assert len(record.events) == RECORDED * (5 + 4 * buckets)
        found = {event[:3]: event[-1] for event in record.events}
        for step in range(SKIPPED, SKIPPED + RECORDED):
            of_step = {m: at for (s, m, _), at in found.items() if s == step}
            assert of_step["forward_start"] < of_step["backward_start"] < of_step["step_end"]
            for bucket in range(buckets):
                marks = ("ready", "packed", "launched", "done")
                at = [found[step, mark, bucket] for mark in marks]
                assert at == sorted(at) and at[-1] <= of_step["step_end"]
        # An origin may be late by what a launch takes, and what is counted from it early.
        assert all(before - 1_000_000 <= at <= after for at in found.values())
