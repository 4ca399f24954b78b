"""A machine loses its link while it trains: network namespaces stand for machines."""

import json
import subprocess
import sys

import pytest

from bench.measure import netns
from tests.scripts import ROOT, environment

MISSING = netns.missing_rights()
needs_links = pytest.mark.skipif(MISSING is not None, reason=f"links: {MISSING}")
WORLD = 3


def start(seat, rank, options):
    placement = seat.placement(0, 1)
    placed = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*placement.prefix, sys.executable, "-m", "tests.cut_script", json.dumps(options)],
        cwd=ROOT,
        env={**environment(), **placement.environment, **placed, "FASTSYNC_STALL_WARN": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@needs_links
@pytest.mark.parametrize(
    "options",
    [{}, {"wire": "int8"}, {"zero": 1}, {"zero": 2}],
    ids=["fp32", "int8", "zero1", "zero2"],
)
def test_the_rank_that_cannot_be_reached_is_named(options):
    """First in a warning, then at the group's timeout. It says itself whom it cannot reach."""
    with netns.network(WORLD) as seats:
        ranks = [start(seat, rank, options) for rank, seat in enumerate(seats)]
        printed = [rank.communicate(timeout=120) for rank in ranks]
    seen = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    print(*seen, *(log for _, log in printed), sep="\n")
    for rank in range(WORLD - 1):
        assert seen[rank]["error"] == "SyncFault"
        assert seen[rank]["ranks"] == [WORLD - 1]
    assert seen[-1]["error"] == "SyncFault"
    assert set(seen[-1]["ranks"]) <= {0, 1}
    assert "rank 2 does not answer" in printed[0][1]
