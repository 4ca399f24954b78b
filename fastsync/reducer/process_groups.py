"""Process groups that fastsync makes, beside the one whose ranks average their gradients.

Each stage of a coded bucket's pipeline has a process group of its own: see csrc/comm/worker.h.
torch makes a group by waiting for all of its ranks, as long as the group's timeout says. So the
ranks first meet in a collective whose wait ends when another rank ends. While it makes the group, a
rank watches for ranks that end.

[Note: the end of a group]
A group has threads and connections, so it ends with the wrapper that it was made for. Ranks need
not do that together: a rank whose collective is over has handed everything to its kernel that the
others wait for. Another wrapper never gets the group, since two ranks might use the two wrappers in
different orders, and collectives of one group have to be in one order. Nor does a later group get
its name, which the store knows already. The end joins threads, which takes long where a collective
has been left unfinished, so it has a thread of its own. It starts once the objects of the extension
that use the group are gone. A process that ends waits for these threads for a while: Python ends
each thread that returns from C++ to an interpreter that is gone, and a destructor there ends the
process with SIGABRT. A group whose end has not started by then never ends.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist

from fastsync._torch import (
    connecting_alone,
    cpu_backend,
    forget_group,
    group_timeout,
    is_apart,
    keep_for_good,
    make_beside,
    renewed_backend,
)
from fastsync.faults.node_links import Nodes
from fastsync.faults.rendezvous import needing_store
from fastsync.reducer.monitor import (
    come_together,
    gather_watched,
    lend_watch,
    looks_out,
    watched_call,
)
from fastsync.wire.formats import Wire

_ENDS = 3.0  # seconds for the groups of wrappers that have died right before the process ends


class OwnGroups:
    """Process groups that one wrapper has for itself. See [Note: the end of a group]."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []

    def end_with(self, user: object) -> None:
        """Let them end with `user`, once.

        Args:
            user: the object of the extension that uses them, if one does: its finalizers run once
                what it stands for has ended.
        """
        weakref.finalize(user, _endings().begin, self._groups).atexit = False

    def merge(self, other: OwnGroups) -> None:
        """Let the groups of another one end with these."""
        self._groups.extend(other._groups)
        other._groups.clear()

    def add(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Let `group` end with the others."""
        self._groups.append(group)
        return group


class _Endings:
    """The ends of this process's groups, which have threads."""

    def __init__(self) -> None:
        self._running: dict[int, list[dist.ProcessGroup]] = {}  # groups of each thread, by list
        self._process_ends = False

    def begin(self, groups: list[dist.ProcessGroup]) -> None:
        """End these groups, which are no longer in use."""
        for group in groups:
            forget_group(group)
        if not groups:
            return
        if self._process_ends:
            _keep(groups)
            return
        # A garbage collection may call this anywhere, and threading.Thread takes locks. No thread
        # can be started while the interpreter ends.
        self._running[id(groups)] = groups
        try:
            _thread.start_new_thread(self._run, (groups,))
        except RuntimeError:
            del self._running[id(groups)]
            _keep(groups)

    def _run(self, groups: list[dist.ProcessGroup]) -> None:
        with contextlib.suppress(IndexError):  # the main thread may keep the rest
            while not self._process_ends:
                groups.pop()
        del self._running[id(groups)]

    def finish(self) -> None:
        """Wait for the threads at the end of the process."""
        self._process_ends = True
        for groups in list(self._running.values()):
            _keep(groups)
        deadline = time.monotonic() + _ENDS
        while self._running and time.monotonic() < deadline:
            time.sleep(0.001)

    def abandon(self) -> None:
        """Forget the threads: this process was forked from the one that has them."""
        self._running.clear()


def _keep(groups: list[dist.ProcessGroup]) -> None:
    for group in list(groups):
        keep_for_good(group)


@cache
def _endings() -> _Endings:
    endings = _Endings()
    atexit.register(endings.finish)
    os.register_at_fork(after_in_child=endings.abandon)
    return endings


def make_links(
    group: dist.ProcessGroup,
    wire: Wire,
    nodes: Nodes | None,
    device: torch.device,
    own: OwnGroups,
) -> list[dist.ProcessGroup]:
    """The process groups of a pipeline's stages, in order. Collective.

    On a device with streams all stages are enqueued at once, in one order on every rank, so that
    stages between the same ranks may share a group. On a CPU collectives are started by the thread
    that runs the backward, but exchanges and whatever follows the first stage by threads of each
    model: those need groups that no other model uses.
    """
    streams = device.type != "cpu"
    if nodes is None:
        if streams:
            return [group, group]
        ranks = dist.get_process_group_ranks(group)
        return [new_group(group, ranks, purpose, own) for purpose in ("codes", "codes of sums")]
    node = wire.node_group or new_group(group, nodes.node_ranks, "inside a node", own)
    if streams:
        cross = wire.cross_group or new_group(group, nodes.cross_ranks, "between nodes", own)
        return [node, cross, cross, node]
    return [
        node,
        new_group(group, nodes.cross_ranks, "between nodes", own),
        new_group(group, nodes.cross_ranks, "between nodes, on the way back", own),
        new_group(group, nodes.node_ranks, "inside a node, on the way back", own),
    ]


def new_cpu_group(group: dist.ProcessGroup, purpose: str, own: OwnGroups) -> dist.ProcessGroup:
    """Return another process group of the same ranks, for CPU tensors alone. Collective."""
    ranks = dist.get_process_group_ranks(group)
    return new_group(group, ranks, purpose, own, backend=cpu_backend(group))


def new_part(
    group: dist.ProcessGroup, number: int, purpose: str, own: OwnGroups
) -> dist.ProcessGroup:
    """A process group of `number` ranks that follow each other in `group`. Collective."""
    begin = group.rank() // number * number
    ranks = dist.get_process_group_ranks(group)[begin : begin + number]
    return new_group(group, ranks, purpose, own)


def find_parts(group: dist.ProcessGroup, within: int | dist.ProcessGroup | None) -> Nodes:
    """Return this rank's place in the grid of parts whose ranks average gradients. Collective.

    Args:
        within: how many ranks of `group` that follow each other are a part, or this rank's part.

    Raises:
        ValueError: the parts are no grid; the same on every rank.
    """
    ranks = dist.get_process_group_ranks(group)
    if not isinstance(within, dist.ProcessGroup):
        number = within or 1
        parts = {rank: tuple(ranks[i - i % number :][:number]) for i, rank in enumerate(ranks)}
    else:
        mine = tuple(sorted(dist.get_process_group_ranks(within)))
        given = gather_watched(mine, group, "the comparison of groups (within=)")
        parts = dict(zip(ranks, given, strict=True))
    for rank, part in parts.items():
        alike = rank in part and all(parts.get(other) == part for other in part)
        if not alike or len(part) != len(parts[ranks[0]]):
            raise ValueError(
                f"sync: within= of rank {rank} is a group of ranks {list(part)}, but that of "
                f"{ranks[0]} one of {list(parts[ranks[0]])}; pass each rank its own group, of "
                "which each rank is in one, and all are of one size"
            )
    mine = parts[ranks[group.rank()]]
    place = mine.index(ranks[group.rank()])
    cross = tuple(part[place] for part in dict.fromkeys(parts.values()))
    return Nodes(mine, cross, place, cross.index(mine[place]))


@cache
def _made() -> weakref.WeakKeyDictionary[dist.ProcessGroup, int]:
    """Return how many groups have been made beside each, the same number on all of its ranks."""
    return weakref.WeakKeyDictionary()


def new_group(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    purpose: str,
    own: OwnGroups,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Return a group of some `ranks` of `group`; all ranks of `group` make it. A Gloo group ends
    with `own`.

    Raises:
        SyncFault: a rank of `group` has ended, or has not made it within the group's timeout.
    """
    number = _made()[group] = _made().get(group, 0) + 1
    carried = renewed_backend(group) if is_apart(group) else None
    carried = carried or backend or dist.get_backend(group)

    def by_torch() -> dist.ProcessGroup:
        with connecting_alone(ranks):
            made: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=group_timeout(group),
                backend=carried,
                use_local_synchronization=True,
                group_desc=f"fastsync: {purpose}",
            )
        return made

    make: Callable[[], dist.ProcessGroup] = by_torch
    ends = carried == "gloo" and group_timeout(group) is not None
    if ends or (is_apart(group) and len(ranks) == group.size()):
        # Parts of a group are made at the same time, and have no rank in common. Ranks that come
        # back number the default group's ranks in another way, but not those of `group`.
        name = f"fastsync/{number}/{dist.get_group_rank(group, ranks[0])}/{purpose}"
        make = partial(make_beside, group, ranks, name, carried)
    keep = own.add if ends else lambda made: made
    if not looks_out(group):
        return keep(make())
    place = f"the making of a process group ({purpose})"
    come_together(group, place)
    with needing_store(group, place):
        # torch itself waits five times as long for a rank that is stopped.
        made = watched_call(group, place, make, within=group_timeout(group))
    lend_watch(made, group)
    return keep(made)
