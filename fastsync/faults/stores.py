"""The rendezvous store, as ranks use it of which any may die or be cut off."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fastsync._torch import Store, TCPStore, root_store

_FILES = Path("/proc/self/fd")
_KEEPALIVES = 4  # in the time after which a connection fails
_MOST_SECONDS, _MOST_MILLISECONDS = 32767, 2**31 - 1  # that Linux takes


def served_at(store: Store) -> tuple[str, int] | None:
    """Return host and port of the process that serves a store; None for stores that are files."""
    root = root_store(store)
    return (root.host, root.port) if isinstance(root, TCPStore) else None


def limit_silence(store: Store, seconds: float) -> None:
    """Let connections to the process that serves `store` fail once its machine is silent for so
    long.

    TCP by itself gives up after a quarter of an hour, in which a rank that has been cut off waits
    for answers. Nothing changes where the system has no such limit, as outside of Linux.
    """
    served = served_at(store)
    if served is None or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for connection in _connections_with(*served):
        limit_connection(connection, seconds)


def limit_connection(connection: socket.socket, seconds: float) -> None:
    """Let a connection fail once the other machine has acknowledged nothing for so long.

    Nothing changes where the system has no such limit.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    pause = min(max(1, round(seconds / _KEEPALIVES)), _MOST_SECONDS)
    limit = min(round(1e3 * seconds), _MOST_MILLISECONDS)
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit),
    )
    for option in options:
        with contextlib.suppress(OSError):
            connection.setsockopt(*option)


def _connections_with(host: str, port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to an address, each open for as long as it is looked at."""
    try:
        hosts = {_plain(str(found[4][0])) for found in socket.getaddrinfo(host, port)}
        files = [int(name) for name in os.listdir(_FILES)]
    except OSError:
        return
    for file in files:
        # Another thread may have closed it.
        with contextlib.suppress(OSError):
            if not os.readlink(_FILES / str(file)).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(file)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = connection.getpeername()
                if peer[1] == port and _plain(peer[0]) in hosts:
                    yield connection


def _plain(address: str) -> str:
    """Return an IPv4 address without the prefix that IPv6 sockets give it."""
    return address.removeprefix("::ffff:")
