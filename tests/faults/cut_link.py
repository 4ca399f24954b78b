"""Trainings of catching_script.py, each rank on a machine of its own: a network namespace."""

import ctypes
import json
import socket
import subprocess

from bench.measure import netns
from tests.helpers.scripts import Forked

WORLD = 3
SUBNET = "fd13:213:"
NEW_NETWORK, NEW_NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS of sched.h


def start(job, rank, world, variables, first=()):
    """A rank of a training in which `job` happens: what, the options of FastDDP, and where."""
    placed = {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    limits = {"FASTSYNC_STALL_WARN": "1", "FASTSYNC_AGREE_TIMEOUT": "3"}
    variables = {**variables, **placed, **limits}
    return Forked("tests.faults.catching_script", json.dumps(job), variables=variables, first=first)


def enter(holder, name):
    """Move this process to a machine: its network, and its host name if it has its own."""
    libc = ctypes.CDLL(None)
    with open(f"/proc/{holder}/ns/net") as network:
        assert libc.setns(network.fileno(), NEW_NETWORK) == 0
    if name:
        assert libc.unshare(NEW_NAMES) == 0
        socket.sethostname(name)


def seen_in(log):
    """Return what a rank has printed as JSON, in one line among those of its log."""
    (line,) = [line for line in log.splitlines() if line.startswith('{"rank"')]
    return json.loads(line)


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
            environ = {**seat.placement(0, 1).environment, **there, **(variables or {})}
            machine = (enter, seat.holder, f"machine{rank}" if own_names else "")
            ranks.append(start(job, rank, world, environ, machine))
        try:
            logs = [r.communicate(120)[0] for r in ranks[: world - (job[0] == "stop")]]
        finally:
            for rank in ranks:
                rank.kill()
    return [seen_in(log) for log in logs], logs
