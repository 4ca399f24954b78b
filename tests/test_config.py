"""Policies: what is accepted and what it becomes."""

import dataclasses

import pytest

from fastsync.codec import Wire
from fastsync.config import BucketPolicy, SyncPolicy

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
    assert free.at_rate(0) == free
    assert free.at_rate(1e12).caps == (MIB, 25 * MIB)
    assert free.at_rate(500e6).caps == (MIB, 10_000_000)
    assert free.at_rate(1e6).caps == (MIB, 4 * MIB)
    assert chosen.at_rate(1e6) == chosen


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
