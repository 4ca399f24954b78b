"""What a rank says of itself before there is a process group."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import fastsync
from fastsync.build.env import Env, set_variables
from fastsync.build.extension import BuildError, origin
from fastsync.build.recipe import sources_digest
from fastsync.doctor.network import Interface, find_interface, gloo_address, list_interfaces
from fastsync.engine import core
from fastsync.ranks.machines import network_space, own_address, process_space
from fastsync.torch_private import Store

__all__ = ["Facts", "Route", "facts_of_this_rank"]


_UNKNOWN = Interface("")


@dataclass(frozen=True)
class Route:
    """How other ranks reach this one.

    Attributes:
        address: empty where there is none.
        interface: that has it; its name is empty where that is unknown.
    """

    address: str = ""
    interface: Interface = _UNKNOWN


_NO_ROUTE = Route()


@dataclass(frozen=True)
class Facts:
    """One rank's, all of them cheap to learn.

    Attributes:
        host: the machine's name.
        machine: equal on ranks that share a machine and its network.
        versions: of everything that takes part, by name.
        extension: where it is; empty where there is none.
        prebuilt: whether ``pip install`` compiled it.
        cache: the folder in which the first import keeps what it compiles, and GiB free there.
        cuda_error: why the extension cannot run kernels on GPUs.
        build_error: why there is no extension.
        memory_error: why this rank has no memory that others could map.
        backends: of torch.distributed that this build of torch has.
        variables: that are set, see `fastsync.build.env.set_variables`.
        cores, threads: that this process may use, and torch's.
        gpus: that this process sees.
        gpu: the kind of its own.
        gloo, store: how Gloo on other ranks finds this one, and this machine's address on the
            way to the rendezvous store.
    """

    host: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    extension: str = ""
    prebuilt: bool = False
    cache: tuple[str, float] = ("", 0.0)
    cuda_error: str = ""
    build_error: str = ""
    memory_error: str = ""
    backends: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    threads: int = 1
    gpus: int = 0
    gpu: str = ""
    gloo: Route = _NO_ROUTE
    store: Route = _NO_ROUTE
    interfaces: tuple[Interface, ...] = ()

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Facts:
        """What `dump` has written."""
        entries = json.loads(text)
        entries["gloo"], entries["store"] = (_route(entries[name]) for name in ("gloo", "store"))
        entries["interfaces"] = tuple(_interface(entry) for entry in entries["interfaces"])
        entries["backends"], entries["cache"] = tuple(entries["backends"]), tuple(entries["cache"])
        return Facts(**entries)


def _route(entry: Mapping[str, object]) -> Route:
    return Route(str(entry["address"]), _interface(entry["interface"]))


def _interface(entry: object) -> Interface:
    assert isinstance(entry, dict)
    return Interface(**{**entry, "addresses": tuple(entry["addresses"])})


def facts_of_this_rank(store: Store | None, local_rank: int) -> Facts:
    """Compiles and loads the extension, which may take a minute.

    Args:
        store: the rendezvous store; None where this process is alone.
    """
    variables, interfaces = set_variables(), list_interfaces()
    extension, prebuilt, build_error = _extension()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gloo = gloo_address(variables.get("GLOO_SOCKET_IFNAME", ""), interfaces)
    return Facts(
        host=socket.gethostname(),
        machine=_machine(),
        versions=_versions(),
        extension=extension,
        prebuilt=prebuilt,
        cache=_cache(),
        cuda_error=build_error or core.device_problem(torch.device("cuda")),
        build_error=build_error,
        memory_error=build_error or _memory_error(),
        backends=_backends(),
        variables=variables,
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        gpus=gpus,
        gpu=torch.cuda.get_device_name(local_rank) if local_rank < gpus else "",
        gloo=_route_at(gloo, interfaces),
        store=_route_at(_address_to(store), interfaces),
        interfaces=interfaces,
    )


def _route_at(address: str, interfaces: tuple[Interface, ...]) -> Route:
    return Route(address, find_interface(address, interfaces) or _UNKNOWN)


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


def _extension() -> tuple[str, bool, str]:
    try:
        found = origin()
    except BuildError as error:
        return "", False, str(error)
    return str(found.file), found.prebuilt, ""


def _cache() -> tuple[str, float]:
    folder = Env.read().cache_dir
    there: Path = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return str(folder), shutil.disk_usage(there).free / 2**30


def _memory_error() -> str:
    try:
        core.make_memory(1 << 20)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def _backends() -> tuple[str, ...]:
    known = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return tuple(name for name in known if dist.is_backend_available(name))


def _address_to(store: Store | None) -> str:
    try:
        return "" if store is None else own_address(store)
    except OSError:
        return ""
