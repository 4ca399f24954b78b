"""The rendezvous store, as ranks use it of which any may die or be cut off."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

from fastsync import torch_private
from fastsync.build.extension import load
from fastsync.torch_private import PrefixStore, Store, TCPStore, file_of, root_store

__all__ = ["file_store", "group_store", "limit_connection", "limit_silence", "served_at"]

_FILES = Path("/proc/self/fd")
_KEEPALIVES = 4  # in the time after which a connection fails
_MOST_SECONDS, _MOST_MILLISECONDS = 32767, 2**31 - 1  # that Linux takes


def group_store(group: dist.ProcessGroup) -> Store | None:
    """The store that `group` was made with; None where torch.distributed knows none.

    Where that is a file, a store in the same file. Those of torch wait for ever once a rank has
    died while it wrote there; see csrc/comm/record_file.h.
    """
    store = torch_private.group_store(group)
    if store is None or (file := file_of(store)) is None:
        return store
    kept = _in_files()
    if group not in kept:
        own = file_store(*file)
        _complete_at_end(file[0])
        kept[group] = PrefixStore(f"fastsync/{group.group_name}", own)
    return kept[group]


def file_store(path: str, timeout: timedelta) -> Store:
    """One in the file of torch's `FileStore`, which the death of a rank does not harm.

    Args:
        timeout: for waits that are given none.

    Raises:
        dist.DistStoreError: of its operations, where the file cannot be read or written.
    """
    store: Store = load().FileStore(path)
    store.set_timeout(timeout)
    return store


@cache
def _complete_at_end(path: str) -> None:
    """Complete the file at exit.

    torch's own store reads it when the interpreter ends, and would wait for the rest of what a rank
    has begun to write for torch.
    """
    atexit.register(_complete, path)


def _complete(path: str) -> None:
    with contextlib.suppress(dist.DistError):  # the file has gone
        load().FileStore(path).add("fastsync/left", 1)


@cache
def _in_files() -> weakref.WeakKeyDictionary[dist.ProcessGroup, Store]:
    """Return the file stores of this process, by group."""
    return weakref.WeakKeyDictionary()


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
