"""Plans of sharded stages whose gradients travel as codes, beside real steps."""

import pytest
import torch

from bench.models import WORKLOADS
from docs.planner_peaks import CAP_MB, Case, measured, planned, traced
from examples.common.ranks import Group
from examples.common.training import make_lane
from examples.common.variants import Variant, fast_ddp
from fastsync.config.policy import BucketPolicy
from fastsync.planner.hardware import Cluster, Link, device_named
from fastsync.planner.step_time import from_record, job_of
from fastsync.planner.strategy import Carrier, Strategy, coded_units, engine_plan
from fastsync.testing import run_ranks

SETTLED = 4  # steps, after which plans are those of measured orders


def job(strategy, name="transformer"):
    record, link, device = traced(name), Link(1e9, 1e-4, "net"), device_named("cpu")
    buckets = BucketPolicy.from_mb(CAP_MB)
    plan, _ = engine_plan(record, strategy, carrier=Carrier.MESSAGES, buckets=buckets)
    cluster = Cluster(strategy.world, 1, link, link, "gloo")
    return job_of(record, strategy, plan, from_record(record, device, 0.0), cluster, device)


def bytes_of_a_step(rank, world, name, stage, wire):
    torch.set_num_threads(1)
    sized = {"bucket_cap_mb": CAP_MB} if stage < 3 else {}
    variant = Variant("run", fast_ddp(zero=stage, wire=wire, shared_memory=False, **sized))
    group = Group(rank, world, torch.device("cpu"))
    lane, counts = make_lane(WORKLOADS[name](), variant, group, "adamw"), []
    for _ in range(SETTLED):
        lane.step()
        counts.append(lane.model.sync_stats().sent_bytes)
    return counts[-1] - counts[-2]


@pytest.mark.slow(but=("1-bf16-2",))
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", ["int8", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_send_what_is_planned(stage, wire, world):
    sent = run_ranks(bytes_of_a_step, world, "transformer", stage, wire, timeout=240.0)
    assert max(sent) == pytest.approx(job(Strategy(stage, world, world, wire=wire)).sent, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_reduction_is_coded(stage):
    once, thrice = (job(Strategy(stage, 4, 4, "int8", rounds)).coding for rounds in (1, 3))
    assert thrice == pytest.approx(3 * once) and once > 0


def test_a_rank_alone_codes_nothing():
    record = traced("transformer")
    assert coded_units(record, Strategy(3, 2, 2, wire="int8"))
    assert not coded_units(record, Strategy(3, 1, 1, wire="int8"))


def peak_of(rank, world, case):
    torch.set_num_threads(1)
    return measured(case, Group(rank, world, torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_peak_is_that_of_a_real_step(stage):
    case = Case("gpt2", stage, wire="int8")
    (real, *_) = run_ranks(peak_of, 2, case, timeout=240.0)
    if real is None:
        pytest.skip("the allocator cannot be asked")
    assert planned(case).total == pytest.approx(real, rel=0.02)


def test_codes_go_where_shares_are_added_up_by_parts():
    ways = {
        (stage, wire): Strategy(stage, 8, 8, wire=wire).possible
        for stage in (0, 1, 2, 3)
        for wire in ("fp32", "bf16", "int8", "int4")
    }
    impossible = {way for way, possible in ways.items() if not possible}
    assert impossible == {(3, "int4")}
