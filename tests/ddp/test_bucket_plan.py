"""From parameters to buckets."""

import random

import pytest
import torch
import torch.distributed as dist

from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.config.topology import Network, Span
from fastsync.reducer.agreement import PlanFacts, agree_on_plan
from fastsync.reducer.buckets import ParamSpec, make_plan, settled_order
from fastsync.wire.formats import FORMATS, Wire
from tests.helpers.teams import run_ranks

CPU = torch.device("cpu")


def specs_of(*numels, dtype=torch.float32, wire="fp32"):
    codec = FORMATS[wire]
    return [ParamSpec(i, numel, dtype, CPU, codec=codec) for i, numel in enumerate(numels)]


def plan_of(specs, order=None, caps=(400,), world=2, **policy):
    order = range(len(specs)) if order is None else order
    return make_plan(specs, list(order), BucketPolicy(caps), SyncPolicy(**policy), world)


def params(plan):
    return [bucket.params for bucket in plan.buckets]


def test_a_bucket_is_closed_by_the_gradient_that_reaches_its_cap():
    assert params(plan_of(specs_of(60, 40, 100, 99, 1))) == [(0, 1), (2,), (3, 4)]
    assert params(plan_of(specs_of(60, 39, 100, 1))) == [(0, 1, 2), (3,)]


def test_caps_count_buckets_and_the_last_one_holds_for_the_rest():
    specs = specs_of(*[10] * 10)
    assert params(plan_of(specs, caps=(40, 120))) == [(0,), (1, 2, 3), (4, 5, 6), (7, 8, 9)]


def sizes(numels, last):
    policy = BucketPolicy((400,), last=last)
    plan = make_plan(specs_of(*numels), range(len(numels)), policy, SyncPolicy(), 2)
    return [sum(numels[i] for i in bucket.params) for bucket in plan.buckets]


def test_buckets_shrink_towards_the_last_one():
    assert sizes([10] * 40, last=None) == [100, 100, 100, 100]
    assert sizes([10] * 40, last=80) == [100, 100, 100, 50, 30, 20]
    assert sizes([10] * 40, last=40) == [100, 100, 100, 50, 30, 10, 10]
    assert sizes([10] * 40, last=4000) == [100, 100, 100, 100]
    assert sizes([300, 10, 10, 10], last=40) == [300, 20, 10]
    assert sizes([10, 10, 10, 300], last=40) == [330]


def test_buckets_that_fill_side_by_side_shrink_together():
    specs = specs_of(*[10] * 20)
    for index in range(1, 20, 2):
        specs[index] = ParamSpec(index, 20, torch.bfloat16, CPU)
    plan = make_plan(specs, range(20), BucketPolicy((400,), last=40), SyncPolicy(), 2)
    assert [len(p) for p in params(plan)] == [7, 7, 2, 3, 1]


def test_order_is_kept_and_may_name_others():
    specs = specs_of(10, 10, 10)
    assert params(plan_of(specs, order=[2, 7, 0, 1])) == [(2, 0, 1)]
    assert params(plan_of(specs[1:], order=[2, 1, 0])) == [(2, 1)]


@pytest.mark.parametrize("order", [[0], [0, 0, 1], [0, 1, 1, 2], []])
def test_an_order_that_misses_or_repeats_is_refused(order):
    with pytest.raises(ValueError, match="exactly once"):
        plan_of(specs_of(1, 1, 1), order=order)


def test_dtypes_and_devices_do_not_mix():
    meta = torch.device("meta")
    specs = [
        ParamSpec(0, 10, torch.float32, CPU),
        ParamSpec(1, 10, torch.bfloat16, CPU),
        ParamSpec(2, 10, torch.float32, CPU),
        ParamSpec(3, 10, torch.float32, meta),
        ParamSpec(4, 10, torch.bfloat16, CPU),
    ]
    # Those that close last are sent last, so that none waits for a later one.
    assert params(plan_of(specs)) == [(0, 2), (3,), (1, 4)]


def test_sparse_gradients_travel_alone_and_uncompressed():
    specs = specs_of(10, 10, 10, wire="bf16")
    specs[1] = ParamSpec(1, 10, torch.float32, CPU, sparse=True, codec=FORMATS["bf16"])
    plan = plan_of(specs, wire=Wire("bf16"))
    assert params(plan) == [(1,), (0, 2)]
    assert [b.sparse for b in plan.buckets] == [True, False]
    assert [b.coded is not None for b in plan.buckets] == [False, True]


def test_views_need_equal_dtypes():
    native = Wire("bf16", form="native")
    assert plan_of(specs_of(1)).buckets[0].views
    assert not plan_of(specs_of(1), views=False).buckets[0].views
    assert not plan_of(specs_of(1, wire="bf16"), wire=native).buckets[0].views
    assert plan_of(specs_of(1, dtype=torch.float64, wire="bf16"), wire=native).buckets[0].views


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_the_native_form_sums_in_the_format_s_own_dtype(wire):
    plan = plan_of(specs_of(1, wire=wire), wire=Wire(wire, form="native"))
    assert plan.buckets[0].coded is None
    assert plan.buckets[0].dtype is FORMATS[wire].native


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_gradients_are_compressed_only_where_that_makes_them_smaller(wire, dtype):
    bucket = plan_of(specs_of(1, dtype=dtype, wire=wire), wire=Wire(wire)).buckets[0]
    smaller = FORMATS[wire].bits < 8 * dtype.itemsize and dtype is not torch.float64
    assert (bucket.coded is not None) == smaller
    assert bucket.dtype is dtype


def test_formats_do_not_mix_in_a_bucket():
    specs = specs_of(10, 10, 10, wire="int8")
    specs[1] = ParamSpec(1, 10, torch.float32, CPU, codec=FORMATS["fp32"])
    plan = plan_of(specs, wire=Wire("int8", overrides={"b": "fp32"}))
    assert params(plan) == [(1,), (0, 2)]
    assert [b.coded is not None for b in plan.buckets] == [False, True]


def test_small_buckets_stay_as_they_are():
    plan = plan_of(specs_of(100, 99, wire="int8"), wire=Wire("int8", min_bytes=400))
    assert [b.coded is not None for b in plan.buckets] == [True, False]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("form", ["two_shot", "gather"])
@pytest.mark.parametrize("wire", FORMATS)
def test_chunks_hold_every_slot_and_flag(world, form, wire):
    numels = [random.Random(world).randrange(1, 5000) for _ in range(20)]
    policy = Wire(wire, form=form, piece_bytes=3000)
    bucket = plan_of(
        specs_of(*numels, wire=wire), caps=(1 << 30,), world=world, wire=policy
    ).buckets[0]
    coded = bucket.coded.layout
    chunks = coded.pieces * (world if form == "two_shot" else 1)
    assert chunks * coded.chunk_numel >= bucket.layout.offsets[-1] + numels[-1]
    assert chunks * coded.flags_per_chunk >= len(numels) + 1
    assert coded.chunk_numel % FORMATS[wire].block == 0
    assert all(offset % FORMATS[wire].block == 0 for offset in bucket.layout.offsets)
    assert coded.coded_bytes == FORMATS[wire].coded_bytes(coded.chunk_numel)
    assert coded.coded_bytes <= coded.flags_offset
    assert coded.flags_offset + 4 * coded.flags_per_chunk <= coded.chunk_bytes
    assert coded.chunk_bytes % 16 == 0
    assert coded.pieces > 1


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_pieces_shrink_on_slow_networks_where_nobody_chose_their_size(wire):
    def pieces(rate, latency=0.0, **options):
        specs = specs_of(32 << 20, wire=wire)
        network = Network(rate, latency)
        bucket = plan_of(specs, wire=Wire(wire, **options), network=network).buckets[0]
        layout = bucket.coded.layout
        return layout.chunk_bytes * layout.chunks / layout.pieces / (1 << 20)

    coded = FORMATS[wire].coded_bytes(4 << 20) / (16 << 20)  # of a byte of gradients
    assert pieces(0) == pytest.approx(4, rel=0.05)
    assert pieces(1e12) == pytest.approx(4, rel=0.05)
    assert pieces(125e6 / coded) == pytest.approx(375e3 / (1 << 20), rel=0.05)
    assert pieces(125e6 / coded, latency=1e-3) == pytest.approx(750e3 / (1 << 20), rel=0.05)
    assert pieces(125e6 / coded, latency=0.1) == pytest.approx(4, rel=0.05)
    assert pieces(1e3) == pytest.approx(0.25, rel=0.05)
    assert pieces(1e3, piece_bytes=2 << 20) == pytest.approx(2, rel=0.05)


def test_devices_send_a_bucket_in_one_piece_where_nobody_chose_their_size():
    """On one stream pieces only cost launches."""

    def pieces(device, **options):
        spec = ParamSpec(0, 32 << 20, torch.float32, torch.device(device), codec=FORMATS["int8"])
        plan = plan_of([spec], wire=Wire("int8", **options))
        return plan.buckets[0].coded.layout.pieces

    assert pieces("cpu") == 8
    assert pieces("cuda") == 1
    assert pieces("cuda", piece_bytes=4 << 20) == 8


def test_flags_are_left_out_where_unused_parameters_are_errors():
    assert plan_of(specs_of(1)).buckets[0].layout.flags_offset == 16
    assert plan_of(specs_of(1), fail_on_unused=True).buckets[0].layout.flags_offset == -1


def test_specs_of_tensors():
    z = torch.empty(3, 2, dtype=torch.complex128)
    assert ParamSpec.of(4, z) == ParamSpec(4, 12, torch.float64, CPU, pairs=True)
    assert ParamSpec.of(4, z).nbytes == 96
    assert ParamSpec.of(0, torch.empty(()), True) == ParamSpec(0, 1, torch.float32, CPU, True)


@pytest.mark.parametrize("seed", range(20))
def test_invariants(seed):
    rng = random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    specs = [
        ParamSpec(i, rng.choice((0, 1, 50, 500)), rng.choice(dtypes), CPU, rng.random() < 0.1)
        for i in range(rng.randint(1, 60))
    ]
    order = rng.sample(range(len(specs)), len(specs))
    caps = tuple(rng.choice((1, 100, 1000)) for _ in range(rng.randint(1, 3)))
    plan = plan_of(specs, order, caps, world=3)
    assert sorted(plan.params) == sorted(order)
    place = {index: position for position, index in enumerate(order)}
    last = []
    for number, bucket in enumerate(plan.buckets):
        positions = [place[i] for i in bucket.params]
        assert positions == sorted(positions)
        assert len({specs[i].dtype for i in bucket.params}) == 1
        assert bucket.layout.numels == tuple(specs[i].numel for i in bucket.params)
        before = sum(specs[i].nbytes for i in bucket.params[:-1])
        assert len(bucket.params) == 1 or before < caps[min(number, len(caps) - 1)] or number
        last.append(positions[-1])
    assert last == sorted(last), "no bucket waits for a gradient behind its successor's"
    assert plan == plan_of(specs, order, caps, world=3)


def test_a_million_parameters_need_no_bucket_each():
    assert len(plan_of(specs_of(*[1] * 20000), caps=(1 << 20,)).buckets) == 1


def test_what_arrives_together_is_put_into_the_order_of_its_group():
    assert settled_order([4, 3, 5, 0, 1], [[3, 4, 5], [1, 2, 0]]) == [3, 4, 5, 1, 0]
    assert settled_order([2, 9, 1], []) == [2, 9, 1]


@pytest.mark.parametrize("seed", range(20))
def test_a_settled_order_names_the_same_parameters(seed):
    draw = random.Random(seed)
    ready = draw.sample(range(20), 12)
    groups = [draw.sample(range(20), draw.randint(1, 8)) for _ in range(4)]
    settled = settled_order(ready, groups)
    assert sorted(settled) == sorted(ready)
    assert settled_order(settled, groups) == settled


# --- Agreement of ranks before they make a plan


def different_views(rank, world, latency):
    trained = [rank == 1, False, rank == 0, True]
    order = [3, 2] if rank == 0 else [0, 3, 2]
    mine = PlanFacts(trained, order, Network(1e6 * (rank + 1), latency * (rank + 1)))
    return agree_on_plan(mine, dist.group.WORLD, CPU)


def test_any_rank_trains_the_first_one_orders_and_the_fastest_has_measured():
    for agreed in run_ranks(different_views, 3, 0.25):
        assert agreed == PlanFacts([True, False, True, True], [3, 2], Network(3e6, 0.25))


def test_a_latency_that_nobody_knows_is_measured_and_the_same_on_all_ranks():
    first, *others = run_ranks(different_views, 3, 0.0)
    assert first.network.latency > 0
    assert all(other == first for other in others)


def nothing_measured(rank, world):
    return agree_on_plan(PlanFacts([True], [0], Network()), dist.group.WORLD, CPU)


def test_no_latency_is_measured_where_no_rate_is():
    for agreed in run_ranks(nothing_measured, 2):
        assert agreed == PlanFacts([True], [0], Network())


def alone(rank, world):
    mine = PlanFacts([True], [0], Network(5.0))
    return agree_on_plan(mine, dist.group.WORLD, CPU) is mine


def test_a_single_rank_agrees_with_itself():
    assert run_ranks(alone, 1) == [True]


# --- Capacity of a network


SPAN = Span(seconds=0.01, latencies=5)


def test_nothing_is_known_before_a_rate_is():
    assert not Network().known
    assert not Network(latency=1.0).known
    assert Network(1.0).known


@pytest.mark.parametrize(
    ("latency", "wanted"), [(0, 1000), (0.001, 1000), (0.002, 1000), (0.004, 2000), (1, 5000)]
)
def test_the_longer_of_a_time_and_so_many_latencies_counts(latency, wanted):
    assert Network(100e3, latency).carries(SPAN, 500, 5000) == wanted


def test_sizes_have_bounds():
    assert Network(1.0).carries(SPAN, 500, 5000) == 500
    assert Network(1e9).carries(SPAN, 500, 5000) == 5000


def test_other_bytes_take_the_same_latency():
    assert Network(8.0, 0.5).at_share(0.25) == Network(2.0, 0.5)
