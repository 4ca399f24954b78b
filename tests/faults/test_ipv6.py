"""Ranks on machines without an IPv4 address, for which network namespaces stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.measure import netns
from tests.helpers.scripts import ROOT, environment

MISSING = netns.missing_rights()
WORLD = 3
SUBNET = "fd13:213:"
needs_links = pytest.mark.skipif(
    MISSING is not None or not Path("/proc/net/if_inet6").exists(),
    reason=f"links: {MISSING or 'no IPv6'}",
)


def give_ipv6_alone(seats):
    """Their links lose their IPv4 addresses."""
    for number, seat in enumerate(seats, 1):
        enabled = f"echo 0 > /proc/sys/net/ipv6/conf/{netns.DEVICE}/disable_ipv6"
        for command in (
            ("sh", "-c", enabled),
            ("ip", "-4", "addr", "flush", "dev", netns.DEVICE),
            ("ip", "addr", "add", f"{SUBNET}:{number}/64", "dev", netns.DEVICE, "nodad"),
        ):
            inside = ("nsenter", f"--net=/proc/{seat.holder}/ns/net")
            subprocess.run([*inside, *command], check=True)


@needs_links
def test_ranks_look_out_for_each_other_by_ipv6_alone():
    with netns.network(WORLD) as seats:
        give_ipv6_alone(seats)
        ranks = []
        for rank, seat in enumerate(seats):
            place = seat.placement(0, 1)
            placed = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
            placed["MASTER_ADDR"] = f"{SUBNET}:1"
            ranks.append(
                subprocess.Popen(
                    [*place.prefix, sys.executable, "-m", "tests.faults.killed_script"],
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
