"""The planner's time: collectives, the events of a step, and what recordings say."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from fastsync.plan.buckets import ParamSpec, make_plan
from fastsync.plan.policy import BucketPolicy, SyncPolicy
from fastsync.planner.compute import Compute, from_record
from fastsync.planner.devices import device_named
from fastsync.planner.links import Cluster, Link, collective_seconds, sent_bytes
from fastsync.planner.profile import Sample, fit
from fastsync.planner.runs import from_run
from fastsync.planner.simulate import Message, job_of, job_of_messages, simulate
from fastsync.planner.strategy import Strategy, engine_plan, named
from fastsync.planner.synthetic import transformer_of
from fastsync.planner.tracing import trace_model
from fastsync.planner.unit_marks import ROOT
from fastsync.timeline.data import BucketInfo, RankRecord, Run

NVLINK, NET = Link(450e9, None, "nvlink", 0.82), Link(50e9, None, "net", 0.92)


def cluster(world, per_node=8):
    return Cluster(world, min(world, per_node), NVLINK, NET)


def test_large_messages_cost_their_bytes():
    at = cluster(8)
    seconds = collective_seconds("all_reduce", 4e9, at)
    assert seconds == pytest.approx(2 * 7 / 8 * 4e9 / (450e9 * 0.82), rel=0.01)
    half = collective_seconds("reduce_scatter", 4e9, at)
    assert half == pytest.approx(seconds / 2, rel=0.01)
    assert sent_bytes("all_reduce", 4e9, 8) == 7e9


def test_small_messages_cost_hops_and_a_tree_has_fewer():
    near = collective_seconds("all_reduce", 1024, cluster(8))
    far = collective_seconds("all_reduce", 1024, cluster(1024))
    assert 5e-6 < near < 20e-6
    # A ring of 128 nodes would take 254 hops of 2.7 us between nodes.
    assert far < 254 * 2.7e-6
    ring = collective_seconds("reduce_scatter", 1024, cluster(1024))
    assert ring > 127 * 2.7e-6
    assert collective_seconds("all_reduce", 1024, cluster(1)) == 0.0


def test_between_nodes_all_links_of_a_node_carry():
    seconds = collective_seconds("all_reduce", 4e9, cluster(16))
    assert seconds == pytest.approx(
        2 * 15 / 16 * 4e9 / min(450e9 * 0.82, 8 * 50e9 * 0.92), rel=0.01
    )
    one = Cluster(2, 1, NVLINK, NET)
    assert collective_seconds("all_reduce", 4e9, one) == pytest.approx(4e9 / 46e9, rel=0.01)


def test_gpus_fill_nodes():
    with pytest.raises(ValueError, match="choose --gpus as a multiple of --per-node"):
        Cluster(12, 8, NVLINK, NET)
    with pytest.raises(ValueError, match="cannot be divided"):
        Strategy(3, 12, 8)


def test_a_line_is_found_again():
    world, latency, rate = 4, 30e-6, 2e9
    hops, factor = 2 * (world - 1), 2 * (world - 1) / world
    sizes = [1 << n for n in range(10, 24, 2)]
    samples = [Sample(n, hops * latency + factor * n / rate) for n in sizes]
    assert fit(samples, world) == pytest.approx((latency, rate))


def step_by_clock(messages, compute, at):
    """Twin of the simulation: a clock that goes on in small ticks."""
    tick = 1e-5
    queue = [(m.ready, collective_seconds("all_reduce", m.nbytes, at)) for m in messages]
    now, left = 0.0, None
    while queue or left is not None:
        if left is None and queue[0][0] <= now + 1e-12:
            left = queue.pop(0)[1]
        now += tick
        if left is not None:
            left -= tick
            left = None if left <= 0 else left
    return compute.forward + max(compute.backward, now)


def test_events_are_those_of_a_clock():
    draw = random.Random(7)
    at = cluster(16)
    for _ in range(5):
        ready = sorted(draw.uniform(0, 0.02) for _ in range(6))
        messages = [Message(r, draw.uniform(1e8, 2e9)) for r in ready]
        compute = Compute(0.01, 0.02, tuple(ready), 0.0)
        time = simulate(job_of_messages(messages, named("0", 16, 8), compute, at))
        assert time.mean == pytest.approx(step_by_clock(messages, compute, at), abs=2e-4)
        assert time.exposed == pytest.approx(time.mean - 0.03)


def test_an_update_is_shared_down_to_the_launches_of_its_operators():
    compute = Compute(0.0, 0.0, (0.0,), 0.008, launches=0.006)
    steps = {stage: Strategy(stage, 4, 4) for stage in (0, 1, 3)}
    jobs = {n: job_of_messages([], how, compute, cluster(4)) for n, how in steps.items()}
    assert [job.update for job in jobs.values()] == pytest.approx([0.008, 0.002, 0.006])
    assert simulate(jobs[1]).computing == pytest.approx(0.002)


def test_computing_pays_for_tensors_and_for_bytes_and_collectives_that_it_hides():
    record = trace_model(lambda: nn.Sequential(*(nn.Linear(900, 900) for _ in range(20))), (4, 900))
    compute = Compute(0.01, 10.0, (0.0,) * len(record.params), 0.0)
    at, how = cluster(4), named("0", 4, 4)
    plan, _ = engine_plan(record, how)
    dear = replace(device_named("cpu"), sending=1e-9, launching=1e-3, handling=1e-5)
    free, paid = (
        simulate(job_of(record, how, plan, compute, at, device))
        for device in (device_named("cpu"), dear)
    )
    lost = 1e-9 * free.sent + 1e-3 * len(plan.buckets) + 1e-5 * len(record.params)
    assert paid.mean - free.mean == pytest.approx(lost)


def test_accumulation_sends_once_and_stage_two_each_time():
    messages = [Message(0.01, 4e9)]
    compute = Compute(0.01, 0.02, (0.01,), 0.0)
    at = cluster(16)
    steps = [
        simulate(job_of_messages(messages, Strategy(stage, 16, 16, accumulate=4), compute, at))
        for stage in (1, 2)
    ]
    assert steps[1].mean > steps[0].mean
    assert steps[1].communicating - steps[0].communicating == pytest.approx(
        3 * collective_seconds("reduce_scatter", 4e9, at)
    )


def test_the_slowest_of_many_is_the_largest_of_many_draws():
    compute = Compute(0.0, 1.0, (), 0.0)
    draw = random.Random(3)
    for world in (2, 64):
        job = job_of_messages([], Strategy(0, world, world), compute, cluster(world))
        largest = [max(math.exp(draw.gauss(0, 0.05)) for _ in range(world)) for _ in range(4000)]
        assert simulate(job, 0.05).mean == pytest.approx(sum(largest) / 4000, rel=0.005)
    assert simulate(job, 0.0).mean == 1.0


def test_buckets_are_the_engines():
    record = trace_model(lambda: nn.Sequential(*(nn.Linear(900, 900) for _ in range(20))), (4, 900))
    plan, _ = engine_plan(record, named("0", 4, 4))
    specs = [ParamSpec.of(i, torch.empty(p.shape)) for i, p in enumerate(record.params)]
    assert plan == make_plan(specs, record.order, BucketPolicy.from_mb(None), SyncPolicy(), 4)
    assert len(plan.buckets) > 2


def traced_step(kind, world, per_node=8):
    record = transformer_of(7 * 10**9, torch.bfloat16, (1, 2048))
    strategy = named(kind, world, per_node)
    device, at = device_named("h100"), cluster(world, per_node)
    compute = from_record(record, device, 16.0 * record.numel)
    plan, _ = engine_plan(record, strategy)
    return simulate(job_of(record, strategy, plan, compute, at, device))


def test_bytes_sent_are_zeros_formulas():
    whole = 2 * 7e9
    sent = {kind: traced_step(kind, 16).sent / (whole * 15 / 16) for kind in "0123"}
    assert sent == pytest.approx({"0": 2, "1": 2, "2": 2, "3": 3}, rel=0.01)


class Read(nn.Module):
    """Blocks after an embedding, which belongs to the root and has most parameters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16384, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_stage_3_gathers_the_root_once():
    record = trace_model(Read, (4, 8), loss=lambda output, _: output)
    roots = sum(param.nbytes for param in record.params if param.unit == ROOT)
    assert 0.5 * record.nbytes < roots < record.nbytes
    for rounds in (1, 3):
        strategy = replace(named("3", 2, 1), accumulate=rounds)
        device, at = device_named("cpu"), cluster(2, 1)
        compute = from_record(record, device, 0.0)
        plan, _ = engine_plan(record, strategy)
        job = job_of(record, strategy, plan, compute, at, device)
        assert job.sent == rounds * (3 * record.nbytes - roots) / 2
        assert job.launched == rounds * (3 * 5 - 1)
        times = [2 if param.unit == ROOT else 3 for param in record.params]
        assert job.handled == rounds * sum(times)


def test_a_straggler_makes_all_ranks_wait():
    compute = Compute(0.01, 0.02, (), 0.005)
    job = job_of_messages([], Strategy(0, 8, 8), compute, cluster(8))
    assert simulate(job, straggler=1.5).mean == pytest.approx(1.5 * 0.035)
    assert simulate(job, 0.05, 1.0).mean == simulate(job, 0.05).mean
    rng = random.Random(8)

    def slowest():
        draws = [rng.lognormvariate(0, 0.05) for _ in range(8)]
        return max(1.03 * draws[0], *draws[1:])

    drawn = sum(slowest() for _ in range(20_000)) / 20_000
    assert simulate(job, 0.05, 1.03).mean == pytest.approx(0.035 * drawn, rel=0.005)


def test_a_rank_alone_waits_for_nothing():
    for kind in "0123":
        time = traced_step(kind, 1)
        assert time.exposed == pytest.approx(0.0, abs=1e-9)
        assert time.efficiency == pytest.approx(1.0)


def test_more_ranks_and_slower_links_never_help():
    for kind in "03":
        exposed = [traced_step(kind, world).exposed for world in (8, 64, 512, 4096)]
        assert exposed == sorted(exposed)


def recorded_run():
    events = []
    for step in range(3):
        base = step * 10_000_000
        events += [
            (step, "forward_start", 0, 0, base),
            (step, "forward_end", 0, 0, base + 1_000_000),
            (step, "backward_start", 1, 0, base + 1_000_000),
            (step, "ready", 0, 0, base + 2_000_000),
            (step, "packed", 0, 0, base + 2_100_000),
            (step, "launched", 0, 1 << 20, base + 2_200_000),
            (step, "done", 0, 0, base + 5_000_000),
            (step, "backward_end", 0, 0, base + 4_000_000),
            (step, "step_end", 0, 0, base + 6_000_000),
        ]
    ranks = tuple(RankRecord(rank, "here", 0, 0, tuple(events)) for rank in range(2))
    plans = ((BucketInfo(("w",), 1 << 20, "float32"),),)
    return Run("Net", 2, "gloo", "cpu", torch.__version__, plans, ranks)


def test_over_gloo_other_collectives_have_their_own_share_of_the_rate():
    def seconds(kind, scatter):
        link = Link(1e9, 0.0, "net", scatter=scatter)
        return collective_seconds(kind, 1e9, Cluster(4, 1, link, link, "gloo"))

    assert seconds("all_reduce", 0.5) == seconds("all_reduce", 1.0) == pytest.approx(1.5)
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        assert seconds(kind, 1.0) == pytest.approx(0.75)
        assert seconds(kind, 0.5) == pytest.approx(1.5)


def test_recordings_say_what_is_computed():
    recorded = from_run(recorded_run())
    assert recorded.compute.forward == pytest.approx(1e-3)
    assert recorded.compute.backward == pytest.approx(3e-3)
    assert recorded.compute.between == pytest.approx(4e-3)
    assert recorded.messages == (Message(pytest.approx(1.2e-3), 1 << 20),)
    assert recorded.jitter == 0.0
