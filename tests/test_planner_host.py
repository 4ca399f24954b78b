"""What sending costs a processor is found in steps whose costs are known."""

from dataclasses import replace

import pytest

from fastsync.planner.host import STACKS, costs_of
from fastsync.planner.links import Cluster, Link
from fastsync.planner.profile import DeviceRates
from fastsync.planner.simulate import simulate

LINK = Link(1e9, 2e-5, "net", scatter=1.0)
CLUSTER = Cluster(2, 2, LINK, LINK, "gloo")
FREE = DeviceRates(flops=3e10, bandwidth=1e10, overhead=5e-6)
COMPUTING = (30e-3, 30e-3, 8e-3)  # seconds of the steps alone


def steps(sending, launching, handling):
    """As they would take on a processor with these costs."""
    for stack, computing in zip(STACKS, COMPUTING, strict=True):
        job = stack.job(FREE, CLUSTER, computing)
        host = sending * job.sent + launching * job.launched
        dear = replace(job, host=host, packing=handling * job.handled)
        yield job, simulate(dear).mean


@pytest.mark.parametrize(
    "costs",
    [(0.0, 0.0, 0.0), (4e-10, 0.0, 0.0), (4e-10, 2e-4, 0.0), (2e-10, 1e-4, 2e-5), (0.0, 0.0, 1e-5)],
)
def test_costs_are_found_again(costs):
    found = costs_of(FREE, list(steps(*costs)))
    for value, unit, true in zip(
        (found.sending, found.launching, found.handling), (1e-10, 1e-4, 1e-5), costs, strict=True
    ):
        assert value == pytest.approx(true, rel=0.01, abs=0.01 * unit)


def test_a_step_that_is_faster_than_planned_costs_nothing():
    quick = [(job, 0.5 * seconds) for job, seconds in steps(0.0, 0.0, 0.0)]
    found = costs_of(FREE, quick)
    assert (found.sending, found.launching, found.handling) == (0.0, 0.0, 0.0)
