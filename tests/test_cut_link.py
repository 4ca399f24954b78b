"""A machine loses its link, or a rank stops, while scripts catch what fastsync raises.

Network namespaces stand for machines.
"""

import json
import subprocess
import sys

import pytest

from bench.measure import netns
from tests.scripts import ROOT, environment

MISSING = netns.missing_rights()
needs_links = pytest.mark.skipif(MISSING is not None, reason=f"links: {MISSING}")
WORLD = 3


def start(how, rank, options, variables, prefix=()):
    placed = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.caught_script", how, json.dumps(options)],
        cwd=ROOT,
        env={**environment(), **variables, **placed, "FASTSYNC_STALL_WARN": "1"},
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
        places = [seat.placement(0, 1) for seat in seats]
        ranks = [
            start("cut", rank, options, place.environment, place.prefix)
            for rank, place in enumerate(places)
        ]
        printed = [rank.communicate(timeout=120) for rank in ranks]
    seen = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    print(*seen, *(log for _, log in printed), sep="\n")
    for rank in range(WORLD - 1):
        assert seen[rank]["error"] == "SyncFault"
        assert seen[rank]["ranks"] == [WORLD - 1]
    assert seen[-1]["error"] == "SyncFault"
    assert set(seen[-1]["ranks"]) <= {0, 1}
    assert "rank 2 does not answer" in printed[0][1]


@pytest.mark.parametrize("options", [{}, {"zero": 2}], ids=["fp32", "zero2"])
def test_who_catches_its_error_and_exits_is_not_taken_for_the_cause(options, tmp_path):
    """Rank 0's time is over a second before rank 1's, and its process ends at once."""
    variables = {"MEETS_AT": f"file://{tmp_path}/store"}
    ranks = [start("stop", rank, options, variables) for rank in range(WORLD)]
    try:
        printed = [rank.communicate(timeout=120) for rank in ranks[:-1]]
    finally:
        for rank in ranks:
            rank.kill()
    print(*printed, sep="\n")
    for out, _ in printed:
        assert json.loads(out.splitlines()[-1])["ranks"] == [WORLD - 1]
