"""Plans of sharded stages whose gradients travel as codes, beside real steps."""

from dataclasses import replace

import pytest
import torch

from bench.models import WORKLOADS
from examples.common.costs import peak_memory
from examples.common.ranks import Group
from examples.common.training import make_lane
from examples.common.variants import Variant, fast_ddp
from fastsync.plan.policy import BucketPolicy
from fastsync.planner.compute import from_record
from fastsync.planner.devices import device_named
from fastsync.planner.links import Cluster, Link
from fastsync.planner.memory import peak_of, phases_of
from fastsync.planner.simulate import job_of
from fastsync.planner.strategy import Carrier, Strategy, engine_plan, named
from fastsync.planner.tracing import trace_model, trace_optimizer
from fastsync.testing import run_ranks

CAP_MB = 25.0
BUCKETS = BucketPolicy.from_mb(CAP_MB)
SETTLED = 4  # steps, after which plans are those of measured orders


def traced(name):
    workload = WORKLOADS[name]()
    shape = tuple(workload.batch(0, 0).shape)
    return trace_model(workload.build, shape, loss=lambda out, _: workload.loss(out))


def lane_of(name, group, stage, **options):
    sized = {"bucket_cap_mb": CAP_MB} if stage < 3 else {}
    variant = Variant("run", fast_ddp(zero=stage, **sized, **options))
    return make_lane(WORKLOADS[name](), variant, group, "adamw")


def bytes_of_a_step(rank, world, name, stage, wire):
    torch.set_num_threads(1)
    group = Group(rank, world, torch.device("cpu"))
    lane = lane_of(name, group, stage, wire=wire, shared_memory=False)
    counts = []
    for _ in range(SETTLED):
        lane.step()
        counts.append(lane.model.sync_stats().sent_bytes)
    return counts[-1] - counts[-2]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", ["int8", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_send_what_is_planned(stage, wire, world):
    measured = run_ranks(bytes_of_a_step, world, "transformer", stage, wire, timeout=240.0)
    record, strategy = traced("transformer"), replace(named(str(stage), world, world), wire=wire)
    device, link = device_named("cpu"), Link(1e9, 1e-4, "net")
    plan, _ = engine_plan(record, strategy, carrier=Carrier.MESSAGES, buckets=BUCKETS)
    compute = from_record(record, device, 0.0)
    cluster = Cluster(world, 1, link, link, "gloo")
    job = job_of(record, strategy, plan, compute, cluster, device)
    assert max(measured) == pytest.approx(job.sent, rel=0.01)


def peak_of_a_step(rank, world, name, stage):
    torch.set_num_threads(1)
    group = Group(rank, world, torch.device("cpu"))
    lane_of(name, group, stage).step()
    return peak_memory(lambda: lane_of(name, group, stage, wire="int8"), group)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_peak_is_that_of_a_real_step(stage):
    (measured, *_) = run_ranks(peak_of_a_step, 2, "gpt2", stage, timeout=240.0)
    if measured is None:
        pytest.skip("the allocator cannot be asked")
    record, strategy = traced("gpt2"), replace(named(str(stage), 2, 2), wire="int8")
    plan = engine_plan(record, strategy, buckets=BUCKETS)
    phases = phases_of(record, strategy, plan, lambda of: trace_optimizer("adamw", of, False))
    assert peak_of(phases).total / record.nbytes == pytest.approx(measured, rel=0.02)


def test_codes_go_where_shares_are_added_up_by_parts():
    ways = {
        (stage, wire): Strategy(stage, 8, 8, wire=wire).possible
        for stage in (0, 1, 2, 3)
        for wire in ("fp32", "bf16", "int8", "int4", "powersgd")
    }
    impossible = {way for way, possible in ways.items() if not possible}
    assert impossible == {(3, "int4"), *((stage, "powersgd") for stage in (1, 2, 3))}
