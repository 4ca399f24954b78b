"""State that the launchers of a training's machines share.

Each launcher serves the ranks of its machine; the first one serves the store as well. Through the
store each reports now and then how its ranks are, with a count that goes on. The others use its
last report. If a count stands still for `_SILENT` seconds, that launcher is gone, and so are its
ranks. What has to be unique among machines, such as the number of a rank that joins, is counted in
the store.

A launcher that cannot reach the store any more counts with its own ranks alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from fastsync._torch import Store
from fastsync.faults.join_gate import ENDED, back_key

T = TypeVar("T")
_TELL = 0.2  # seconds between two tales, where few are listening
_LISTENERS = 50.0  # launchers that tell and listen in a second
_SILENT = 10.0  # and at least so many turns of telling
_TURNS = 5


@dataclass(frozen=True)
class Machine:
    """The ranks of one machine.

    Attributes:
        ranks: that its launcher has started, one that has been started again once.
        running: processes; `trains`: those of them that have what all need.
        failed: ranks that have ended badly for good.
        done: its launcher starts no more.
    """

    ranks: int
    running: int
    trains: int
    failed: int = 0
    done: bool = False

    @property
    def left(self) -> int:
        """Ranks that run, or have ended well."""
        return self.ranks - self.failed


@dataclass
class _Heard:
    machine: Machine
    count: int = 0
    at: float = field(default_factory=time.monotonic)


class Launchers:
    """Launchers of all machines, as one of them sees them.

    Args:
        store: a place in the store that has no other user.
        node: the number of this machine.
        nodes: how many there are.
        per_node: ranks that each machine begins with.

    Attributes:
        cut: the store cannot be reached.
        ends: a rank of some machine has come to its end, as of this launcher's last report.
    """

    def __init__(self, store: Store, node: int, nodes: int, per_node: int) -> None:
        self._store, self.node, self.nodes = store, node, nodes
        self._begun = nodes * per_node
        unheard = Machine(per_node, per_node, per_node)  # it is about to begin
        self._heard = {n: _Heard(unheard) for n in range(nodes) if n != node}
        self._count, self._next = 0, 0.0
        self._pause = max(_TELL, nodes / _LISTENERS)
        self.cut = self.ends = False

    def begin(self) -> bool:
        """Return whether a launcher of this machine has been here before."""
        lives = self._ask(lambda: self._store.add(f"lives/{self.node}", 1), 1)
        return lives > 1

    def agreed(self, options: str) -> str:
        """Return the options of machine 0's launcher; `options` are those of this one."""
        if self.node == 0:
            self._store.set("options", options)
        return self._store.get("options").decode()

    def next_process(self) -> int:
        """Return another number for each process that is started after the others."""
        return self._ask(lambda: self._store.add("processes", 1), 0)

    def next_rank(self) -> int:
        """Return the number of a rank that joins."""
        return self._begun - 1 + self._ask(lambda: self._store.add("joined", 1), 0)

    def end_training(self) -> None:
        """Record that a rank has come to its end: no rank may join any more."""
        self._ask(lambda: self._store.set(ENDED, ""), None)

    def is_back(self, process: int) -> bool:
        """Return whether a process that was started after the others trains."""
        return self._ask(lambda: self._store.check([back_key(process)]), False)

    def tell(self, mine: Machine, at_once: bool = False) -> None:
        """Report how the ranks of this machine are, and read the other
        reports; not at every call.
        """
        if time.monotonic() < self._next and not at_once:
            return
        self._next, self._count = time.monotonic() + self._pause, self._count + 1
        tale = json.dumps({**asdict(mine), "count": self._count})
        self._ask(lambda: self._store.set(f"machine/{self.node}", tale), None)
        self.ends = self.ends or self._ask(lambda: self._store.check([ENDED]), False)
        for node, heard in self._heard.items():
            self._hear(node, heard)

    def _hear(self, node: int, heard: _Heard) -> None:
        key = f"machine/{node}"
        if not self._ask(lambda: self._store.check([key]), False):
            return
        told = json.loads(self._ask(lambda: self._store.get(key), b"{}"))
        count = told.pop("count", heard.count)
        if count != heard.count:  # a launcher that is started again counts from one
            heard.machine, heard.count, heard.at = Machine(**told), count, time.monotonic()

    @property
    def others(self) -> list[Machine]:
        """Return the other machines as they are now. A machine whose launcher is silent has no
        ranks left.
        """
        if self.cut:
            return []
        return [self._now(heard) for heard in self._heard.values()]

    def _now(self, heard: _Heard) -> Machine:
        silent = time.monotonic() - heard.at > max(_SILENT, _TURNS * self._pause)
        if not heard.count or heard.machine.done or not silent:
            return heard.machine
        return replace(heard.machine, running=0, trains=0, failed=heard.machine.ranks)

    @property
    def busy(self) -> bool:
        """Return whether another launcher is not through."""
        return any(machine.running and not machine.done for machine in self.others)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self.cut:
            return otherwise
        try:
            return question()
        except RuntimeError:
            self.cut = True
            print(
                "fastsync.elastic: machine 0, whose launcher serves the store, cannot be reached: "
                "the ranks of this machine go on until one ends, and none is started again",
                file=sys.stderr,
            )
            return otherwise
