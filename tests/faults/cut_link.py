"""Trainings of catching_script.py, each rank on a machine of its own: a network namespace."""

import json
import subprocess
import sys

from bench.measure import netns
from tests.helpers.scripts import ROOT, environment

WORLD = 3
SUBNET = "fd13:213:"
UNSHARE = ("unshare", "--uts", "sh", "-c")


def start(job, rank, world, variables, prefix=()):
    """A rank of a training in which `job` happens: what, the options of FastDDP, and where."""
    placed = {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.faults.catching_script", json.dumps(job)],
        cwd=ROOT,
        env={
            **environment(),
            **variables,
            **placed,
            "FASTSYNC_STALL_WARN": "1",
            "FASTSYNC_AGREE_TIMEOUT": "3",
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def give_ipv6_alone(seats):
    """Take the IPv4 addresses of their links away."""
    for number, seat in enumerate(seats, 1):
        enabled = f"echo 0 > /proc/sys/net/ipv6/conf/{netns.DEVICE}/disable_ipv6"
        for command in (
            ("sh", "-c", enabled),
            ("ip", "-4", "addr", "flush", "dev", netns.DEVICE),
            ("ip", "addr", "add", f"{SUBNET}:{number}/64", "dev", netns.DEVICE, "nodad"),
        ):
            inside = ("nsenter", f"--net=/proc/{seat.holder}/ns/net")
            subprocess.run([*inside, *command], check=True)


def train_apart(job, variables=None, own_names=False, world=WORLD, ipv6=False):
    """Return what each rank has seen, and its log.

    Args:
        own_names: machines have them, so that ranks cannot ask for each other's processes.
        ipv6: machines have no IPv4 address.
    """
    with netns.network(world) as seats:
        ranks, there = [], {}
        if ipv6:
            give_ipv6_alone(seats)
            there = {"MASTER_ADDR": f"{SUBNET}:1"}
        for rank, seat in enumerate(seats):
            place = seat.placement(0, 1)
            named = (*UNSHARE, f'hostname machine{rank}; exec "$@"', "sh") if own_names else ()
            environ = {**place.environment, **there, **(variables or {})}
            ranks.append(start(job, rank, world, environ, (*place.prefix, *named)))
        try:
            printed = [r.communicate(timeout=120) for r in ranks[: world - (job[0] == "stop")]]
        finally:
            for rank in ranks:
                rank.kill()
    seen = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    return seen, [log for _, log in printed]
