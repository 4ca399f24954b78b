"""Shaped links between ranks of one machine: network namespaces joined by veth pairs.

A namespace stands for a machine, with one rank or several. Two get one pair between them. More are
joined by a bridge in a namespace of its own. A rate is set by a token bucket (tc's tbf) at both
ends of every pair, so that each machine is shaped in both directions.

Namespaces have no names and belong to processes: each lasts as long as there is one in it. The one
that holds it waits for the end of a pipe, so it ends when the benchmark does, even by a SIGKILL.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from examples.common.ranks import Placement, UsageError

DEVICE, PORT = "fslink", 29500  # in every rank's own namespace
SUBNET = "10.213.0"
RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmg])bit")
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# The token bucket's depth: less loses throughput at 1 Gbit/s, where a timer's tick is 32 KiB.
BURST_SECONDS, LEAST_BURST, QUEUE = 0.002, 1 << 16, "4mb"
LOOPBACK, UNSHAPED = "loopback", "veth"
SLOW, SLOW_SCALE = 500e6, 0.125  # bit/s; of models there
LINK_VARIABLE = "BENCH_LINK"  # tells a rank its seat
TOOLS = ("ip", "tc", "nsenter", "unshare")


@dataclass(frozen=True)
class LinkName:
    """A link as asked for: "loopback", "veth" or a rate in tc's notation, such as "100mbit"; raises
    UsageError if it is none of these."""

    name: str

    def __post_init__(self) -> None:
        if self.rate is not None and not self.bits_per_second:
            wanted = "expects loopback, veth, or a number and a unit, such as 100mbit"
            raise UsageError(f"unknown rate {self.rate!r}; {wanted}")

    @property
    def on_links(self) -> bool:
        """Return whether ranks need namespaces of their own."""
        return self.name != LOOPBACK

    @property
    def rate(self) -> str | None:
        """Return the rate to shape the link to, in tc's notation."""
        return None if self.name in (LOOPBACK, UNSHAPED) else self.name

    @property
    def bits_per_second(self) -> float | None:
        """Return the same as a number."""
        match = RATE.fullmatch(self.rate or "")
        return float(match["number"]) * UNITS[match["unit"]] if match else None

    @property
    def burst(self) -> int:
        """Bytes that pass at once after a pause."""
        return max(LEAST_BURST, int((self.bits_per_second or 0.0) / 8 * BURST_SECONDS))

    @property
    def scale(self) -> float:
        """Return the size of the model that suits the link."""
        return SLOW_SCALE if (self.bits_per_second or SLOW) < SLOW else 1.0


def parse_links(names: str) -> tuple[LinkName, ...]:
    """Parse links with commas between them; raise UsageError if one is unknown."""
    return tuple(LinkName(name.strip()) for name in names.split(","))


def missing_rights() -> str | None:
    """Why no link can be shaped here, in words, or None where one can."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux, this is {platform.system()}"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian, Ubuntu: apt install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with network(2) as seats:
            _shape(seats[0].holder, DEVICE, "1gbit")
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip() or error.returncode}"
    return None


class Seat(NamedTuple):
    """The seat of the ranks of one machine: the process that holds their namespace, in which their
    end of the link is DEVICE, and the place of the other end of its veth pair."""

    holder: str
    far_holder: str
    far_device: str

    def placement(self, local_rank: int, local_ranks: int) -> Placement:
        """Return how to start a rank inside the namespace, with Gloo bound to its link."""
        environment = {
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_ranks),
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that addresses have no host names
            LINK_VARIABLE: ",".join(self),
        }
        return Placement(_inside(self.holder), environment)


@contextmanager
def network(machines: int) -> Iterator[tuple[Seat, ...]]:
    """Namespaces and links for at least two machines: the seat of each.

    Raises:
        subprocess.CalledProcessError: on entry, where the system refuses; nothing is left behind.
    """
    if machines < 2:
        raise UsageError(f"a link joins at least two machines, but got {machines}")
    with ExitStack() as opened:
        holders = [opened.enter_context(_namespace()) for _ in range(machines)]
        if machines == 2:
            seats = tuple(Seat(holders[r], holders[1 - r], DEVICE) for r in range(2))
            _join(seats[0])
        else:
            switch = opened.enter_context(_namespace())
            _in(switch, "ip", "link", "add", "bridge", "type", "bridge")
            _in(switch, "ip", "link", "set", "bridge", "up")
            seats = tuple(Seat(holder, switch, f"port{r}") for r, holder in enumerate(holders))
            for seat in seats:
                _join(seat)
                _in(switch, "ip", "link", "set", seat.far_device, "master", "bridge", "up")
        # Neighbour discovery of IPv6 would be counted as traffic of the benchmark.
        quiet = f"echo 1 > /proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6 2>/dev/null || true"
        for number, holder in enumerate(holders, 1):
            _in(holder, "sh", "-c", quiet)
            _in(holder, "ip", "addr", "add", f"{SUBNET}.{number}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _in(holder, "ip", "link", "set", device, "up")
        yield seats


@contextmanager
def _namespace() -> Iterator[str]:
    """A new namespace: the process that holds it."""
    command = ["unshare", "--net", "sh", "-c", "echo ready && exec cat"]
    pipe = subprocess.PIPE
    # In a session of its own: Ctrl-C is for the benchmark.
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as holder:
        assert holder.stdout is not None and holder.stderr is not None
        if not holder.stdout.readline():
            raise subprocess.CalledProcessError(holder.wait(), command, stderr=holder.stderr.read())
        yield str(holder.pid)


def _join(seat: Seat) -> None:
    """Make the veth pair of a seat."""
    far = ("name", seat.far_device, "netns", seat.far_holder)
    _in(seat.holder, "ip", "link", "add", "name", DEVICE, "type", "veth", "peer", *far)


@dataclass(frozen=True)
class Link:
    """A rank's own link, as that rank sees it.

    Attributes:
        device: the interface that its traffic leaves by.
        seat: None on the loopback device.
        sharers: ranks whose traffic the device's counter adds up.
    """

    device: str
    seat: Seat | None
    sharers: int

    @classmethod
    def here(cls, world: int) -> Link:
        """Return the link of the rank that asks: what `network` placed it on, else loopback."""
        value = os.environ.get(LINK_VARIABLE)
        if not value:
            return cls("lo", None, world)
        return cls(DEVICE, Seat(*value.split(",")), int(os.environ["LOCAL_WORLD_SIZE"]))

    def shape(self, rate: str | None) -> None:
        """Collective. Limits both directions of every machine to `rate`; None lifts the limit.

        Of two machines each one shapes its own end, which is the other's far end.
        """
        if self.seat is not None and dist.get_node_local_rank() == 0:
            _shape(self.seat.holder, DEVICE, rate)
            if self.seat.far_device != DEVICE:
                _shape(self.seat.far_holder, self.seat.far_device, rate)
        dist.barrier()

    def these(self, names: Iterable[LinkName]) -> list[LinkName]:
        """Return the links that this rank's seat allows, the unshaped ones first."""
        here = [name for name in names if name.on_links == (self.seat is not None)]
        return sorted(here, key=lambda name: name.rate is not None)

    def sent_bytes(self) -> int:
        """Return this rank's share of the bytes that have left by the device, headers included."""
        return self.all_sent_bytes() // self.sharers

    def all_sent_bytes(self) -> int:
        """Return the same of all ranks that share the device."""
        lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
        mine = next(line for line in lines if line.strip().startswith(f"{self.device}:"))
        return int(mine.partition(":")[2].split()[8])


class PeakMeter:
    """Reads what has left by a link again and again, while it is entered.

    Attributes:
        most: bytes that have left in any WINDOW seconds at most.
    """

    WINDOW, PAUSE = 0.1, 0.01

    def __init__(self, link: Link) -> None:
        self._link, self._ends, self.most = link, threading.Event(), 0.0
        self._seen: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> PeakMeter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self.most = most_within(self._seen, self.WINDOW)

    def _read(self) -> None:
        while not self._ends.is_set():
            self._seen.append((time.perf_counter(), self._link.all_sent_bytes()))
            self._ends.wait(self.PAUSE)
        self._seen.append((time.perf_counter(), self._link.all_sent_bytes()))


def most_within(seen: Sequence[tuple[float, float]], window: float) -> float:
    """Return the largest growth of a count within `window` seconds, if it grows evenly from one
    reading to the next.

    Args:
        seen: times, which increase, and counts.
    """
    most, begin = 0.0, 0
    for moment, count in seen:
        # The last reading that is as old as the window.
        while begin + 1 < len(seen) and seen[begin + 1][0] <= moment - window:
            begin += 1
        old, before = seen[begin]
        if old <= moment - window:
            later, after = seen[begin + 1]
            before += (after - before) * (moment - window - old) / (later - old)
        most = max(most, count - before)
    return most


def _shape(holder: str, device: str, rate: str | None) -> None:
    """Limit what leaves by `device` of a namespace to `rate`, in tc's notation; None: no limit."""
    if rate is None:
        with suppress(subprocess.CalledProcessError):  # there may be none
            _in(holder, "tc", "qdisc", "del", "dev", device, "root")
        return
    limit = ("tbf", "rate", rate, "burst", str(LinkName(rate).burst), "limit", QUEUE)
    _in(holder, "tc", "qdisc", "replace", "dev", device, "root", *limit)


def _inside(holder: str) -> tuple[str, str]:
    """Return the prefix of a command that runs in a namespace."""
    return "nsenter", f"--net=/proc/{holder}/ns/net"


def _in(holder: str, *command: str) -> None:
    subprocess.run([*_inside(holder), *command], capture_output=True, text=True, check=True)
