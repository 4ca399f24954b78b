"""Capacity of a network."""

import pytest

from fastsync.config.topology import Network, Span

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
