"""A machine loses its link, or a rank stops, while scripts catch what fastsync raises.

Network namespaces stand for machines.
"""

from pathlib import Path

import pytest
import torch.distributed as dist

from bench.measure import netns
from tests.faults.cut_link import WORLD, seen_in, start, train_apart
from tests.faults.fault_table import WAYS
from tests.faults.machine_faults import OPTIONS, needs_store, patience, says_whom_it_cannot_reach
from tests.helpers.served_store import environment_of

CUTS = [
    *(("forward", way) for way in WAYS),
    *(("backward", way) for way in WAYS),
    ("pieces", "int8"),
    ("pieces", "zero2"),
    ("vote", "fp32"),
    ("wrap", "int8"),
    ("checkpoint", "zero1"),
]
MISSING = netns.missing_rights()
needs_ipv6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="links: no IPv6")
needs_links = pytest.mark.skipif(MISSING is not None, reason=f"links: {MISSING}")


def trained_apart(*job, **options):
    seen, logs = train_apart(*job, **options)
    print(*seen, *logs, sep="\n")
    return seen, logs


@pytest.mark.slow
@needs_links
@pytest.mark.parametrize(("place", "way"), CUTS)
def test_the_rank_that_cannot_be_reached_is_named(place, way):
    """First in a warning, then at the group's timeout. It says itself whom it cannot reach."""
    seen, logs = trained_apart(["cut", OPTIONS[way], place], patience(place, way))
    for rank in range(WORLD - 1):
        assert seen[rank]["error"] == "SyncFault"
        assert seen[rank]["ranks"] == [WORLD - 1]
    assert says_whom_it_cannot_reach(seen[-1], place, way)
    assert needs_store(place, way) or "rank 2 does not answer" in logs[0]


@pytest.mark.slow("IPv4")
@needs_links
@pytest.mark.parametrize(
    "ipv6", [False, pytest.param(True, marks=needs_ipv6)], ids=["IPv4", "IPv6"]
)
def test_a_machine_that_acknowledges_nothing_is_lost_before_the_timeout(ipv6):
    """On both sides."""
    variables = {"FASTSYNC_LOST_AFTER": "2", "TIMEOUT": "100"}
    seen, logs = trained_apart(["cut", {}, "forward"], variables, own_names=True, ipv6=ipv6)
    words = "was lost with its machine, or with the network to it,"
    assert f"rank {WORLD - 1} {words}" in logs[0], "a warning says so, too"
    for rank in range(WORLD):
        assert seen[rank]["error"] == "SyncFault"
        assert words in seen[rank]["text"] and "The backend says" not in seen[rank]["text"]
    assert seen[0]["ranks"] == seen[1]["ranks"] == [WORLD - 1]
    assert set(seen[-1]["ranks"]) <= {0, 1}


@pytest.mark.slow
@needs_links
def test_a_rank_that_is_stopped_is_not_taken_for_a_machine_that_is_lost():
    seen, _ = trained_apart(["stop", {}, "forward"], {"FASTSYNC_LOST_AFTER": "1"}, True)
    for rank in range(WORLD - 1):
        assert seen[rank]["ranks"] == [WORLD - 1]
        assert f"rank {WORLD - 1} does not answer" in seen[rank]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": 2}], ids=["fp32", "zero2"])
def test_who_catches_its_error_and_exits_is_not_taken_for_the_cause(options):
    """Rank 0's time is over a second before rank 1's, and its process ends at once."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**environment_of(store.port)}
    ranks = [start(["stop", options, "forward"], r, WORLD, variables) for r in range(WORLD)]
    try:
        logs = [rank.communicate(120)[0] for rank in ranks[:-1]]
    finally:
        for rank in ranks:
            rank.kill()
    print(*logs, sep="\n")
    for log in logs:
        assert seen_in(log)["ranks"] == [WORLD - 1]
