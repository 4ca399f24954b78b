"""Policies: what is accepted and what it becomes."""

import dataclasses

import pytest

from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.config.topology import Network
from fastsync.wire.formats import Wire

MIB = 1 << 20


@pytest.mark.parametrize(
    ("cap", "caps", "wanted"),
    [
        (None, None, (MIB, 25 * MIB)),
        (10, None, (10 * MIB,)),
        (0.5, None, (MIB // 2,)),
        (1e-9, None, (1,)),
        (None, [1, 2, 3], (MIB, 2 * MIB, 3 * MIB)),
        (7, [1, 2], (MIB, 2 * MIB)),
    ],
)
def test_bucket_caps(cap, caps, wanted):
    assert BucketPolicy.from_mb(cap, caps).caps == wanted


def test_buckets_shrink_on_slow_networks_where_nobody_chose_their_size():
    free, chosen = BucketPolicy.from_mb(None), BucketPolicy.from_mb(25)
    assert free.on(Network()) == free
    assert free.on(Network(1e12)) == BucketPolicy((MIB, 25 * MIB), True, 25 * MIB)
    assert free.on(Network(2e9)) == BucketPolicy((MIB, 10_000_000), True, 4_000_000)
    assert free.on(Network(1e6)) == BucketPolicy((MIB, 4 * MIB), True, MIB)
    assert chosen.on(Network(1e6)) == chosen


def test_buckets_make_up_for_latency():
    free = BucketPolicy.from_mb(None)
    assert free.on(Network(100e6, 1e-3)).caps == free.on(Network(100e6)).caps
    assert free.on(Network(100e6, 0.1)) == BucketPolicy((MIB, 25 * MIB), True, 25 * MIB)


def test_buckets_shrink_towards_the_last_one_which_nothing_hides():
    policy = BucketPolicy((100,), last=10)
    assert policy.limit(closed=3, left=1000) == 100
    assert policy.limit(closed=3, left=60) == 30
    assert policy.limit(closed=3, left=5) == 10
    assert BucketPolicy((100, 50)).limit(closed=0, left=5) == 100
    assert BucketPolicy((100, 50)).limit(closed=7, left=5) == 50


@pytest.mark.parametrize("cap", [0, -1, -0.5, float("nan"), float("inf")])
def test_wrong_bucket_caps(cap):
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        BucketPolicy.from_mb(cap)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        BucketPolicy.from_mb(None, [1, cap])


def test_wrong_policies():
    for caps in ((), (0,), (1, -1)):
        with pytest.raises(ValueError, match="must be positive"):
            BucketPolicy(caps)
    with pytest.raises(ValueError, match=r"'fp4'.*'fp32'.*'bf16'.*'fp16'"):
        SyncPolicy(wire=Wire("fp4"))


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncPolicy().wire = Wire("bf16")
