"""Answers to other ranks, given beside the main thread over connections of their own.

A process has one listening socket and one thread that sleeps in accept(), however many models it
wraps. Each request has a thread of its own, as long as it is answered. Addresses lie in the
rendezvous store together with a secret, so only ranks of the job are answered.

[Note: what dies early]
A rank may come to the end of its script, or leave the function that trains, while another still
has to ask it for something: mostly rank 0, which saves. So what is served is kept for some seconds
after its owner has died, but no longer than until it has died on all ranks, or another model is
wrapped: the rank that saves has passed that, too. At the end of a process that still serves
something, it waits until all others have come there, or for some seconds, and as long as it is
being read.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from io import BufferedReader, RawIOBase
from typing import Any, Protocol, cast

import torch.distributed as dist

from fastsync._torch import FileStore, Store, connect_store, root_store
from fastsync.faults.exit_reasons import before_leaving
from fastsync.faults.machines import own_address
from fastsync.faults.stores import limit_connection, served_at

_STAYS = 5.0  # seconds after a script's end, for a rank that saves
_CONNECTS = 30.0  # seconds for a connection
_KNOCKS = 10.0  # seconds for the secret to arrive once there is a connection
_LONGEST = 1 << 20  # bytes of a request
_READS = 1 << 20  # bytes of a reader's buffer
_HEAD = struct.Struct("!?Q")  # whether there is an answer, and how long its head or the error is
_LOOKS = 0.1  # seconds between two looks whether all ranks have let go of something
_SILENCE = 0.1  # seconds between two looks at a rank that does not answer
_STORE_ANSWERS = timedelta(seconds=1)  # at the end of a process


@dataclass(frozen=True)
class Answer:
    """The answer to a rank that asks: a head, and bytes, whose number follows from the head."""

    head: bytes
    body: Iterable[memoryview]


class Served(Protocol):
    """An object that other ranks may ask. Its methods are called on threads of the server."""

    def answer(self, request: dict[str, Any]) -> AbstractContextManager[Answer]:
        """Return the answer, which is sent before the context is left.

        Raises:
            RuntimeError: there is none; the other rank raises its text.
        """


class Server:
    """The server of this process.

    Args:
        host: address of this machine to listen on.
        lost_after: seconds in which the machine of a rank that asks may acknowledge nothing.

    Attributes:
        address: host, port and secret, as JSON.
        closed: it does not serve any more.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, host: str, lost_after: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=128)
        self._secret, self._lost_after = secrets.token_hex(16), lost_after
        self.address = json.dumps([host, self._listening.getsockname()[1], self._secret])
        self.closed = self._ends = False
        self._connections: set[socket.socket] = set()
        self._served: weakref.WeakValueDictionary[str, Served] = weakref.WeakValueDictionary()
        self._kept: deque[_Kept] = deque()
        self._keeper: threading.Thread | None = None
        self._teams: dict[str, _Team] = {}
        self._acceptor = threading.Thread(target=self._accept, name="fastsync-serving", daemon=True)
        self._acceptor.start()

    def serve(self, name: str, served: Served) -> None:
        """Answer requests for `name` as long as `served` lives."""
        self._served[name] = served

    def outlive(self, name: str, served: Served, group: str) -> None:
        """Keep `served` for some seconds, see [Note: what dies early]. Every rank calls it.

        Args:
            group: name of the process group of these ranks.
        """
        team = self._teams.get(group)
        if self.closed or team is None:
            return
        self._kept.append(_Kept(served, team, name, time.monotonic() + _STAYS))
        # Garbage collection may call this anywhere, so there is no lock here.
        if self._keeper is None or not self._keeper.is_alive():
            self._keeper = threading.Thread(target=self._keep, daemon=True)
            self._keeper.start()

    def expect(self, group: dist.ProcessGroup, store: Store, former: str = "") -> None:
        """Wait for the ranks of `group` at the end of this process. Every rank calls it.

        Args:
            store: that of the group.
            former: name of the group that this one replaces.
        """
        self._kept.clear()
        before = self._teams.pop(former, None)
        known = self._teams.get(group.group_name)
        if known is not None and known.group() is group:
            return
        common = store.compare_set("fastsync/served", "", secrets.token_hex(8)).decode()
        open_store: Callable[[], Store]
        if served := served_at(store):
            open_store = partial(_reach, *served)
        elif isinstance(root := root_store(store), FileStore):
            open_store = partial(FileStore, cast(Any, root).path, -1)
        elif before is not None:
            open_store = before.open
        else:
            return
        key = f"fastsync/served/{common}"
        self._teams[group.group_name] = _Team(open_store, key, group)

    # -- what happens at the end, see `exit_reasons.ExitingRank` --

    def leave(self, how: str, why: str) -> None:
        """Tell the others that this rank asks for nothing any more."""
        if self.closed or self._ends:
            return
        self._ends = how == "ends"
        for team in self._teams.values():
            team.tell("ended")

    def wait_for_peer_exit(self, seconds: float) -> None:
        """Do nothing: the ranks' watch waits for others."""

    def close(self) -> None:
        """Serve for some seconds more if others may ask, then stop."""
        deadline, pause = time.monotonic() + _STAYS, 0.001
        while self._ends and (self._connections or self._is_wanted(deadline)):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self.closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()
        for thread in (self._acceptor, self._keeper):  # must end before the interpreter
            if thread is not None:
                thread.join(2 * _STORE_ANSWERS.total_seconds())

    def abandon(self) -> None:
        """Close the connections in a forked process, which would keep them open too long."""
        self.closed = True
        for connection in (self._listening, *self._connections):
            with contextlib.suppress(OSError):
                connection.close()

    def _is_wanted(self, deadline: float) -> bool:
        if not self._served or time.monotonic() > deadline:
            return False
        return any(not team.has_been_reported("ended") for team in self._teams.values())

    # -- threads --

    def _keep(self) -> None:
        while self._kept and not self.closed:
            for kept in list(self._kept):
                if kept.is_over():
                    with contextlib.suppress(ValueError):  # another model has been wrapped
                        self._kept.remove(kept)
            del kept
            time.sleep(_LOOKS)

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self.closed or self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # no descriptors are left
                continue
            self._connections.add(connection)
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        try:
            # The other rank may have ended, or be none.
            with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
                connection.settimeout(_KNOCKS)
                if hmac.compare_digest(lines.readline(_LONGEST).strip(), self._secret.encode()):
                    connection.settimeout(None)
                    limit_connection(connection, self._lost_after)
                    if request := lines.readline(_LONGEST):
                        self._answer(connection, json.loads(request))
        finally:
            self._connections.discard(connection)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                served = self._served.get(request["name"])
                if served is None:
                    raise RuntimeError("it has nothing of that any more")
                answer = stack.enter_context(served.answer(request))
            except Exception as error:  # of classes of the user's, too
                text = str(error) if type(error) is RuntimeError else repr(error)
                connection.sendall(_HEAD.pack(False, len(text.encode())) + text.encode())
                return
            connection.sendall(_HEAD.pack(True, len(answer.head)) + answer.head)
            for part in answer.body:
                connection.sendall(part)


class _Team:
    """Ranks that may ask each other.

    Args:
        open_store: connects with their store, also once the process group has been destroyed.
        key: begins the keys of what they tell each other.
        group: theirs, which is not kept alive. One that is made after it was destroyed may have
            the same name.
    """

    def __init__(self, open_store: Callable[[], Store], key: str, group: dist.ProcessGroup) -> None:
        self.open, self._key, self._size = open_store, key, group.size()
        self.group = weakref.ref(group)
        self._store: Store | None = None

    def tell(self, what: str) -> None:
        """Say that `what` is so on this rank."""
        self._add(what, 1)

    def has_been_reported(self, what: str) -> bool:
        """Return whether all ranks have told it, or the store has gone."""
        ranks = self._add(what, 0)
        return ranks is None or ranks >= self._size

    def _add(self, what: str, ranks: int) -> int | None:
        """Return the number of ranks that have told it; None where the store has gone."""
        try:
            self._store = self._store or self.open()
            return self._store.add(f"{self._key}/{what}", ranks)
        except ConnectionRefusedError:
            return None
        except (RuntimeError, OSError):  # it may be slow
            self._store = None
            return 0


@dataclass(eq=False)
class _Kept:
    """Something that is served, whose owner has died on this rank.

    Attributes:
        team: the ranks that may ask for it.
        name: equal on all of them.
        deadline: until when it is kept.
        reported: the others know.
    """

    served: Served
    team: _Team
    name: str
    deadline: float
    reported: bool = False

    def is_over(self) -> bool:
        """Return whether no rank can ask for it any more, or for long enough none has."""
        if not self.reported:
            self.team.tell(self.name)
            self.reported = True
        return time.monotonic() > self.deadline or self.team.has_been_reported(self.name)


def _reach(host: str, port: int) -> Store:
    with socket.create_connection((host, port), timeout=_STORE_ANSWERS.total_seconds()):
        pass  # c10d would try for as long as it may
    return connect_store(host, port, _STORE_ANSWERS)


@cache
def _servers() -> dict[str, Server]:
    """Return the servers of this process, by host."""
    return {}


def open_server(store: Store, lost_after: float) -> Server:
    """Return the server of this process.

    Raises:
        OSError: this machine cannot listen where other ranks could reach it.
    """
    host, servers = own_address(store), _servers()
    if host not in servers or servers[host].closed:
        servers[host] = Server(host, lost_after)
        before_leaving(servers[host])
    return servers[host]


# Is entered while another rank does not answer; what it yields is called now and then, may raise.
Waits = Callable[[], AbstractContextManager[Callable[[], None]]]


class _Answers(RawIOBase):
    """The bytes of a connection, from a rank that may be stopped."""

    def __init__(self, connection: socket.socket, waits: Waits) -> None:
        super().__init__()
        self._connection, self._waits = connection, waits
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._comes():
            with self._waits() as look:
                while not self._comes():
                    look()
        return self._connection.recv_into(buffer)

    def _comes(self) -> bool:
        return bool(self._poll.poll(1000 * _SILENCE))


class Call:
    """A connection to the server of another rank, which does not end its process meanwhile.

    Args:
        address: its `Server.address`.
        lost_after: seconds in which its machine may acknowledge nothing.
        waits: watches that rank.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, address: str, lost_after: float, waits: Waits) -> None:
        host, port, secret = json.loads(address)
        self._connection = socket.create_connection((host, port), timeout=_CONNECTS)
        self._connection.settimeout(None)
        limit_connection(self._connection, lost_after)
        self._reader = BufferedReader(_Answers(self._connection, waits), _READS)
        self._connection.sendall(f"{secret}\n".encode())

    def ask(self, request: dict[str, Any]) -> bytes:
        """Ask once, and return the head of the answer.

        Args:
            request: plain values for `Served.answer`; "name" says whose.

        Raises:
            RuntimeError: the other rank has no answer; says why. Or `waits` raises it.
            OSError: the other rank has ended.
        """
        self._connection.sendall(f"{json.dumps(request)}\n".encode())
        there, size = _HEAD.unpack(self._read(_HEAD.size))
        content = self._read(size)
        if not there:
            raise RuntimeError(content.decode())
        return content

    def fill(self, memory: memoryview) -> None:
        """Read the next bytes of the answer's body.

        Raises:
            OSError: the other rank has ended.
        """
        done = 0
        while done < len(memory):
            got = self._reader.readinto(memory[done:])
            if not got:
                raise ConnectionResetError("the connection has been closed")
            done += got

    def close(self) -> None:
        self._reader.close()
        self._connection.close()

    def _read(self, size: int) -> bytes:
        content = bytearray(size)
        self.fill(memoryview(content))
        return bytes(content)
