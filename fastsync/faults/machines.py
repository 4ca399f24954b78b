"""Identity of machines, and this machine's address on the way to the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fastsync._torch import Store
from fastsync.faults.stores import served_at

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def process_space() -> str:
    """Return a text that is equal on ranks for which process numbers mean the same."""
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {socket.gethostname()}"
    except OSError:
        return socket.gethostname()


def network_space() -> str:
    """Return a text that is equal on ranks that see each other's processes and share a network.

    Containers with a network of their own count as machines.

    Raises:
        OSError: the system does not say.
    """
    boot = _BOOT.read_text(encoding="ascii").strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return f"{boot} {spaces}"


def own_address(store: Store) -> str:
    """Return this machine's address on the way to the store, where all ranks have been.

    Raises:
        OSError: there is no way.
    """
    place = served_at(store)
    if place is None:
        return "127.0.0.1"
    ways = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)
    obstacle = OSError(f"{place[0]} has no address")
    # IPv4 first: a rank that has no IPv6 address could not call one.
    for family, kind, protocol, _, where in sorted(ways, key=lambda way: way[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            obstacle = error
    raise obstacle
