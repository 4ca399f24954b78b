"""Memory at the peak of a step, in units of the parameters' bytes."""

import pytest

from fastsync import FastDDP
from tests.fsdp.fsdp_models import loss_of, net, words
from tests.simulated.measure import BUCKETS, DEVICE, measure
from tests.simulated.ranks import run_simulated

BLOCKS, WIDTH = 6, 128


def peak_of(case, world=2):
    return max(found[0] for found in run_simulated(measure, world, case, BLOCKS, WIDTH))


def largest_bucket(rank, world):
    """Return its part of the parameters' bytes, in the plan that follows the first step."""
    from tests.simulated.device import placed

    model = net(BLOCKS, WIDTH)
    size = 4 * sum(p.numel() for p in model.parameters())
    wrapped = FastDDP(placed(model), bucket_cap_mb=size / BUCKETS / 2**20, zero=2)
    for step in range(2):
        loss_of(wrapped, words(rank, step).to(DEVICE)).backward()
    return max(bucket.nbytes for bucket in wrapped.reducer.engine.plan.buckets) / size


@pytest.mark.slow
def test_stages_hold_two_buckets_more_than_they_must():
    """Activations and what the optimizer's step takes are those of DDP, which holds 4 besides."""
    plain, bucket = peak_of("DDP, views"), run_simulated(largest_bucket, 2)[0]
    least = {"zero=0": 4.0, "zero=1": 3.0, "zero=2": 2.5}
    for case, held in least.items():
        assert peak_of(case) <= plain - 4.0 + held + 2 * bucket, case


@pytest.mark.slow
def test_units_hold_no_more_than_those_of_fsdp2():
    assert peak_of("fully_shard") <= peak_of("FSDP2")
