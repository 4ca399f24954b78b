"""Facts that a rank knows of itself before there is a process group.

Interfaces come from Linux: /sys and /proc.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import platform
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import fastsync
from fastsync._build.env import Env, set_variables
from fastsync._build.extension import origin
from fastsync._build.recipe import BuildError, sources_digest
from fastsync._torch import Store
from fastsync.faults.machines import network_space, own_address, process_space
from fastsync.reducer import core

_SYS, _INET6 = Path("/sys/class/net"), Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


class Interface(NamedTuple):
    """A network interface.

    Attributes:
        addresses: IPv4 and IPv6, as far as the system tells.
        mtu: bytes of the largest packet; 0: unknown.
    """

    name: str = ""
    addresses: tuple[str, ...] = ()
    mtu: int = 0


@dataclass(frozen=True)
class Facts:
    """Facts of one rank, all of them cheap to learn.

    Attributes:
        host: the machine's name.
        machine: equal on ranks that share a machine and its network.
        versions: of everything that takes part, by name.
        prebuilt: whether ``pip install`` compiled the extension.
        cache: the folder in which the first import keeps what it compiles, and GiB free there.
        cuda_error: why the extension cannot run kernels on GPUs.
        build_error: why there is no extension.
        backends: of torch.distributed that this build of torch has.
        variables: that are set, see `fastsync._build.env.set_variables`.
        cores, threads: that this process may use, and torch's.
        gpus: that this process sees; `gpu`: the kind of its own.
        gloo: address at which Gloo on other ranks finds this one; empty: there is none.
        store: this machine's address on the way to the rendezvous store.
    """

    host: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    prebuilt: bool = False
    cache: tuple[str, float] = ("", 0.0)
    cuda_error: str = ""
    build_error: str = ""
    backends: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    threads: int = 1
    gpus: int = 0
    gpu: str = ""
    gloo: str = ""
    store: str = ""
    interfaces: tuple[Interface, ...] = ()

    def address(self, backend: str) -> str:
        """Return the address at which others reach this rank; NCCL leaves out the loopback
        interface."""
        return self.gloo if backend == "gloo" else self.store

    def interface(self, backend: str) -> Interface:
        """Return the interface with that address; without a name if it is unknown."""
        return find_interface(self.address(backend), self.interfaces) or Interface()

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Facts:
        """Read what `dump` has written."""
        entries = json.loads(text)
        entries["interfaces"] = tuple(
            Interface(n, tuple(a), m) for n, a, m in entries["interfaces"]
        )
        entries["backends"], entries["cache"] = tuple(entries["backends"]), tuple(entries["cache"])
        return Facts(**entries)


def facts_of_this_rank(store: Store | None, local_rank: int) -> Facts:
    """Compile and load the extension, which may take a minute, and say what there is.

    Args:
        store: the rendezvous store; None: this process is alone.
    """
    variables, interfaces = set_variables(), _list_interfaces()
    prebuilt, build_error = False, ""
    try:
        prebuilt = origin().prebuilt
    except BuildError as error:
        build_error = str(error)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folder = Env.read().cache_dir
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return Facts(
        host=socket.gethostname(),
        machine=_machine(),
        versions=_versions(),
        prebuilt=prebuilt,
        cache=(str(folder), shutil.disk_usage(there).free / 2**30),
        cuda_error=build_error or core.device_problem("cuda"),
        build_error=build_error,
        backends=tuple(name for name in _BACKENDS if dist.is_backend_available(name)),
        variables=variables,
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        gpus=gpus,
        gpu=torch.cuda.get_device_name(local_rank) if local_rank < gpus else "",
        gloo=gloo_address(variables.get("GLOO_SOCKET_IFNAME", ""), interfaces),
        store=_address_to(store),
        interfaces=interfaces,
    )


def _machine() -> str:
    try:
        return network_space()
    except OSError:
        return process_space()


def _versions() -> dict[str, str]:
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "none",
        "fastsync": fastsync.__version__,
        "fastsync's sources": sources_digest(),
    }


def _address_to(store: Store | None) -> str:
    try:
        return "" if store is None else own_address(store)
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Return whether `address` reaches this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def find_interface(address: str, interfaces: tuple[Interface, ...]) -> Interface | None:
    """Return the interface with `address`; for any loopback address, the one of that kind."""
    for interface in interfaces:
        if address in interface.addresses:
            return interface
    if is_loopback(address):
        return next((i for i in interfaces if any(map(is_loopback, i.addresses))), None)
    return None


def gloo_address(wanted: str, interfaces: tuple[Interface, ...]) -> str:
    """Return the address at which the other ranks find this one's Gloo.

    Gloo takes the interface that GLOO_SOCKET_IFNAME names. Without it, it takes the first address
    of the machine's name at which it can listen, and 127.0.0.1 if there is none.

    Args:
        wanted: the variable, empty where it is not set; of several names the first counts.

    Returns:
        Empty if there is no such interface, or it has no address.
    """
    if wanted:
        first = wanted.split(",")[0]
        return next((i.addresses[0] for i in interfaces if i.name == first and i.addresses), "")
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return str(where[0])
    return _LOOPBACK


def _list_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this machine, or of a container that has its own network."""
    six: dict[str, tuple[str, ...]] = {}  # 32 digits, four numbers, and a name in each line
    for line in _INET6.read_text().splitlines() if _INET6.exists() else ():
        digits, *_, name = line.split()
        six[name] = (*six.get(name, ()), str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    found = []
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        four: tuple[str, ...] = ()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                four = (socket.inet_ntoa(answer[20:24]),)
            except OSError:  # it has none
                pass
        try:
            mtu = int((_SYS / name / "mtu").read_text())
        except (OSError, ValueError):  # drivers refuse what they do not know
            mtu = 0
        found.append(Interface(name, (*four, *six.get(name, ())), mtu))
    return tuple(found)
