"""Shaped links between ranks of one machine: network namespaces joined by veth pairs.

Two ranks get one pair between their namespaces. More ranks are joined by a bridge in a namespace of
its own. A rate is set by a token bucket (tc's tbf) at both ends of every pair, so that each rank is
shaped in both directions.

No device is ever made in the namespace that the benchmark was started from, so removing the
namespaces removes everything. Their names carry the process that made them and when it started:
what a killed run has left behind is recognised and removed by the next one.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from examples.common.ranks import Placement, UsageError

DEVICE = "fslink"  # in every namespace of a rank
PORT = 29500  # free in a namespace that nobody else uses
SUBNET = "10.213.0"
NAMESPACES = Path("/run/netns")
OURS = re.compile(r"fsbench-(?P<pid>\d+)-(?P<started>\d+)-")
RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmg])bit")
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
# The bucket's depth: less than this loses throughput at 1 Gbit/s, where a timer's tick is 32 KiB.
BURST, QUEUE = "256kb", "4mb"
LOOPBACK, UNSHAPED = "loopback", "veth"
SLOW = 500e6  # bit/s
SLOW_SCALE = 0.125
INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINK_VARIABLE = "BENCH_LINK"  # tells a rank its namespace and its port of the switch


@dataclass(frozen=True)
class LinkName:
    """A link as asked for: "loopback", "veth" or a rate in tc's notation, such as "100mbit".

    Raises:
        UsageError: it is none of these.
    """

    name: str

    def __post_init__(self) -> None:
        match = None if self.rate is None else RATE.fullmatch(self.rate)
        if self.rate is not None and (match is None or not float(match["number"])):
            wanted = "expects loopback, veth, or a number and a unit, such as 100mbit"
            raise UsageError(f"unknown rate {self.rate!r}; {wanted}")

    @property
    def on_links(self) -> bool:
        """Whether ranks need namespaces of their own."""
        return self.name != LOOPBACK

    @property
    def rate(self) -> str | None:
        """What to shape the link to, in tc's notation."""
        return None if self.name in (LOOPBACK, UNSHAPED) else self.name

    @property
    def bits_per_second(self) -> float | None:
        """The same as a number."""
        match = None if self.rate is None else RATE.fullmatch(self.rate)
        return None if match is None else float(match["number"]) * UNITS[match["unit"]]

    @property
    def scale(self) -> float:
        """The size of the model that suits the link."""
        rate = self.bits_per_second
        return SLOW_SCALE if rate is not None and rate < SLOW else 1.0


def parse_links(names: str) -> tuple[LinkName, ...]:
    """Links with commas between them; raises UsageError."""
    return tuple(LinkName(name.strip()) for name in names.split(","))


def missing_rights() -> str | None:
    """Why no link can be shaped here, in words, or None where one can."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux, this is {platform.system()}"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found (Debian, Ubuntu: apt install iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with Network(2) as network:
            _shape(network.seats[0].namespace, DEVICE, "1gbit")
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip() or error.returncode}"
    return None


class Seat(NamedTuple):
    """Where one rank lives: its namespace, in which its end of the link is DEVICE, and where the
    other end of its veth pair is."""

    namespace: str
    far_namespace: str
    far_device: str


class Network:
    """Namespaces and links for some ranks, from `with` to its end.

    Args:
        ranks: at least two.

    Raises:
        subprocess.CalledProcessError: on entry, where `ip` refuses; nothing is left behind.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 2:
            raise UsageError(f"a link joins at least two ranks, but got {ranks}")
        prefix = f"fsbench-{os.getpid()}-{_start_time(os.getpid())}"
        self._switch = f"{prefix}-switch"
        names = [f"{prefix}-{rank}" for rank in range(ranks)]
        self.seats = tuple(
            Seat(name, names[1 - rank], DEVICE)
            if ranks == 2
            else Seat(name, self._switch, f"port{rank}")
            for rank, name in enumerate(names)
        )

    def __enter__(self) -> Network:
        remove_stale()
        try:
            for seat in self.seats:
                _ip("netns", "add", seat.namespace)
            self._join()
            self._configure()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _join(self) -> None:
        if len(self.seats) > 2:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
        for seat in self.seats if len(self.seats) > 2 else self.seats[:1]:
            near = ("name", DEVICE, "netns", seat.namespace)
            far = ("name", seat.far_device, "netns", seat.far_namespace)
            _ip("link", "add", *near, "type", "veth", "peer", *far)
            if len(self.seats) > 2:
                port = ("-n", self._switch, "link", "set", seat.far_device)
                _ip(*port, "master", "bridge")
                _ip(*port, "up")

    def _configure(self) -> None:
        # Neighbour discovery of IPv6 would be counted as traffic of the benchmark.
        quiet = f"echo 1 > /proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6 2>/dev/null || true"
        for rank, seat in enumerate(self.seats):
            _ip("netns", "exec", seat.namespace, "sh", "-c", quiet)
            address = ("addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", DEVICE)
            for what in (address, ("link", "set", "lo", "up"), ("link", "set", DEVICE, "up")):
                _ip("-n", seat.namespace, *what)

    def _remove(self) -> None:
        with _uninterrupted():
            for name in [*(seat.namespace for seat in self.seats), self._switch]:
                if (NAMESPACES / name).exists():
                    _ip("netns", "delete", name)

    def placement(self, rank: int) -> Placement:
        """How to start `rank` inside its namespace, with Gloo bound to its link."""
        seat = self.seats[rank]
        environment = {
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns that addresses have no host names
            LINK_VARIABLE: ",".join(seat),
        }
        return Placement(("ip", "netns", "exec", seat.namespace), environment)


@dataclass(frozen=True)
class Link:
    """A rank's own link, as that rank sees it.

    Attributes:
        device: the interface that its traffic leaves by.
        seat: the namespaces and devices of both ends; None on the loopback device.
        sharers: ranks whose traffic the device's counter adds up.
    """

    device: str
    seat: Seat | None
    sharers: int

    @classmethod
    def here(cls, world: int) -> Link:
        """The link of the rank that asks: what `Network` placed it on, else loopback."""
        value = os.environ.get(LINK_VARIABLE)
        return cls(DEVICE, Seat(*value.split(",")), 1) if value else cls("lo", None, world)

    def shape(self, rate: str | None) -> None:
        """Collective. Limits both directions of every rank to `rate`; None lifts the limit.

        With two ranks each one shapes its own end, which is the other's far end.
        """
        if self.seat is not None:
            _shape(self.seat.namespace, DEVICE, rate)
            if self.seat.far_device != DEVICE:
                _shape(self.seat.far_namespace, self.seat.far_device, rate)
        dist.barrier()

    def these(self, names: Iterable[LinkName]) -> list[LinkName]:
        """Those of the links that this rank's place allows, the unshaped ones first."""
        here = [name for name in names if name.on_links == (self.seat is not None)]
        return sorted(here, key=lambda name: name.rate is not None)

    def sent_bytes(self) -> int:
        """Bytes that have left by the device so far, headers included; of this rank's share."""
        counter = Path("/sys/class/net") / self.device / "statistics" / "tx_bytes"
        return int(counter.read_text()) // self.sharers


def _shape(namespace: str, device: str, rate: str | None) -> None:
    """Limits what leaves by `device` of `namespace` to `rate`, in tc's notation; None: no limit."""
    queue = ("netns", "exec", namespace, "tc", "qdisc")
    if rate is None:
        with suppress(subprocess.CalledProcessError):  # there may be none
            _ip(*queue, "del", "dev", device, "root")
        return
    limit = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
    _ip(*queue, "replace", "dev", device, "root", *limit)


def remove_stale() -> list[str]:
    """Removes what processes that no longer run have left behind, ranks included; returns names."""
    made = {name: OURS.match(name) for name in _ours()}
    stale = [n for n, m in made.items() if m and _start_time(int(m["pid"])) != m["started"]]
    for name in stale:
        for pid in _ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    return stale


def _ours() -> list[str]:
    if not NAMESPACES.is_dir():
        return []
    return sorted(entry.name for entry in NAMESPACES.iterdir() if OURS.match(entry.name))


def _start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]


def _ip(*arguments: str) -> str:
    # In a session of its own: Ctrl-C is for the benchmark, which then removes what there is.
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=True, start_new_session=True
    )
    return done.stdout


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    """Has `handler` called for these signals; in the main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts off what would stop a removal half-way: an impatient second Ctrl-C, a SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    try:
        with handled(INTERRUPTING, lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)
