"""Links between the ranks that units travel between: how they are reached, counted and watched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from fastsync._torch import all_gather_flat, is_gloo, is_registered, resolvable_name
from fastsync.faults.consensus import RankMismatchError, Statement, agree
from fastsync.faults.sync_fault import SyncFault
from fastsync.fsdp.mesh import Place
from fastsync.reducer import core
from fastsync.reducer.monitor import explained, is_over, open_watch, watch_of, watched
from fastsync.reducer.process_groups import OwnGroups, new_cpu_group
from fastsync.reducer.shared_memory import share_memory

_PLACE = "the connection of units"


@dataclass(frozen=True)
class Peers:
    """The ranks of a group: what counts and watches them, the group, and the units' device."""

    ranks: core.UnitPeers
    group: dist.ProcessGroup
    device: torch.device

    def join(self, log: core.UnitLog, names: Sequence[str]) -> None:
        self.ranks.join(log, watch_of(self.group), names, str(self.device))


@dataclass
class Links:
    """Links that the units of a model over the same ranks have in common.

    Attributes:
        core: the ranks that share.
        used: the group that C++ uses, and does not keep alive.
        shares: those ranks, for counters and the watch.
        replicas: ranks that have the same shares; None where no other rank has.
        travels: whether what is gathered does so while this thread goes on: as messages of a CPU's,
            where the ranks do not exchange through memory that they share.
    """

    core: core.UnitLinks
    used: dist.ProcessGroup
    shares: Peers
    replicas: Peers | None = None
    travels: bool = False
    made: int = 0

    @classmethod
    def of(cls, place: Place, in_memory: bool, mark: int, statement: Statement) -> Links:
        """Connect the ranks that share, and those that have the same shares. Collective.

        Args:
            in_memory: whether ranks of one machine may exchange through memory that they share.
            mark: bytes of whole parameters and buffers; see fastsync/fsdp/connections.py.
            statement: what they must agree on.

        Raises:
            RankMismatchError: they do not; on all ranks of the mesh.
        """
        own = place.by_messages and place.world > 1 and is_registered(place.group)
        if own or place.device.type != "cpu":
            _look_out(place, place.group)
        with explained(place.group, _PLACE):  # as far as faults are watched by now
            return cls._connected(place, own, in_memory, mark, statement)

    @classmethod
    def _connected(
        cls, place: Place, own: bool, in_memory: bool, mark: int, statement: Statement
    ) -> Links:
        """Connect the ranks. `own`: the units have a process group of their own."""
        groups = OwnGroups()
        used = new_cpu_group(place.group, "units", groups) if own else place.group
        _agree(place, used, statement)
        memory = share_memory(used, 0) if own and in_memory else None
        links = core.UnitLinks(resolvable_name(used), memory, mark)
        groups.end_with(links)
        replicas = None
        if place.replicas is not None:
            _look_out(place, place.replicas)
            peers = core.UnitPeers(place.replicas.rank())
            replicas = Peers(peers, place.replicas, place.device)
        shares = Peers(links.peers(), place.group, place.device)
        travels = place.by_messages and place.world > 1 and memory is None
        return cls(links, used, shares, replicas, travels)

    def next_tag(self) -> int:
        """Return a tag that no other unit has."""
        self.made += 1
        return 2 * self.made

    def peers(self) -> Iterator[Peers]:
        yield self.shares
        if self.replicas is not None:
            yield self.replicas


def _look_out(place: Place, group: dist.ProcessGroup) -> None:
    """Make the ranks of `group` watch each other, if they can. Collective."""
    if group.size() == 1 or not is_registered(group):
        return
    open_watch(group)
    watch = watch_of(group)
    if watch is not None and place.device.type != "cpu":
        watch.watch_over(resolvable_name(group), str(place.device))


def _agree(place: Place, group: dist.ProcessGroup, statement: Statement) -> None:
    failure = "units cannot be connected on every rank;"
    found: RankMismatchError | None = None
    try:
        agree(statement, group, place.device, failure, partial(watched, group, _PLACE))
    except RankMismatchError as error:
        found = error
    if place.replicas is not None:  # whose ranks may have heard nothing
        known = replace(statement, error=str(found or ""))
        run = partial(watched, place.replicas, _PLACE)
        agree(known, place.replicas, place.device, failure, run)
    if found is not None:
        raise found


def wait_for(work: dist.Work, transfer: core.Transfer, group: dist.ProcessGroup) -> None:
    """Wait for a collective of `group` that Python has started, and watch for faults of its ranks.

    Raises:
        SyncFault: one of them has ended.
        RuntimeError: the backend has failed; names the unit.
    """
    transfer.begin_wait()
    try:
        if is_gloo(group):
            while not is_over(work):
                transfer.look()
        else:
            work.wait()
    except SyncFault:
        raise
    except RuntimeError as error:
        transfer.fail(str(error))
    transfer.end_wait()


class FlatGather:
    """A gather of equal parts of the ranks of a group, which Python starts and waits for.

    Args:
        part: this rank's.
        peers: the object that counts it.
        name: of the unit.
    """

    def __init__(
        self,
        part: torch.Tensor,
        group: dist.ProcessGroup,
        peers: core.UnitPeers,
        name: core.UnitName,
    ) -> None:
        self._group = group
        self._gathered = part.new_empty(group.size() * part.numel())
        self._transfer = peers.begin(name, "gather", (group.size() - 1) * part.nbytes)
        self._work = all_gather_flat(self._gathered, part, group)

    def wait(self) -> torch.Tensor:
        """Return the parts of all ranks, in their order, once they have come."""
        wait_for(self._work, self._transfer, self._group)
        return self._gathered

    def arrived(self) -> None:
        """Note that the parameters are where modules compute with them."""
        self._transfer.arrived()
