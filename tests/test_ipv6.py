"""Ranks on machines without an IPv4 address, for which network namespaces stand."""

import re
import subprocess
import sys

import pytest

from bench.measure import netns
from tests.scripts import ROOT, environment

MISSING = netns.missing_rights()
WORLD = 3


def has_ipv6():
    """Whether links may have such addresses here."""
    try:
        with netns.network(2, ipv6=True):
            return True
    except subprocess.CalledProcessError:
        return False


needs_links = pytest.mark.skipif(
    MISSING is not None or not has_ipv6(), reason=f"links: {MISSING or 'no IPv6'}"
)


@needs_links
def test_ranks_look_out_for_each_other_by_ipv6_alone():
    with netns.network(WORLD, ipv6=True) as seats:
        ranks = []
        for rank, seat in enumerate(seats):
            place = seat.placement(0, 1)
            placed = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
            placed["MASTER_ADDR"] = f"{netns.SUBNET_6}:1"
            ranks.append(
                subprocess.Popen(
                    [*place.prefix, sys.executable, "-m", "tests.sudden_script"],
                    cwd=ROOT,
                    env={**environment(), **place.environment, **placed},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            texts = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for text in (texts[0], texts[2]):
        assert re.search("SyncFault: fastsync: rank 1 was killed by SIGKILL", text), texts
