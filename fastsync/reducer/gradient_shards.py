"""Units of parameters whose gradients the ranks share: each keeps one region of the averages."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastsync._torch import keep_for_good, resolvable_name
from fastsync.faults.node_links import Nodes
from fastsync.reducer import core
from fastsync.reducer.buckets import ShardSlot
from fastsync.reducer.monitor import gather_watched
from fastsync.reducer.process_groups import OwnGroups, new_cpu_group


@dataclass(frozen=True)
class ShardedUnit:
    """Parameters whose gradients the ranks share.

    Attributes:
        params: indices.
        offsets: first element of each, among as many equal regions as there are ranks.
        region: elements of one region.
        gradients: what this rank keeps.
    """

    params: Sequence[int]
    offsets: Sequence[int]
    region: int
    gradients: core.ShardedGradients


class GradientShards:
    """The units of one engine, and the process group that their regions travel over.

    On a CPU that group is used for nothing else: two models whose regions went over one would take
    each other's. Where the ranks share memory, they read each other's regions instead.
    """

    def __init__(
        self,
        reducer: core.Reducer,
        group: dist.ProcessGroup,
        device: torch.device,
        memory: core.SharedMemory | None,
    ) -> None:
        self._core, self._group, self._device = reducer, group, device
        self._memory, self._own = memory, OwnGroups()
        self._own.end_with(reducer)
        self._links: dist.ProcessGroup | None = None
        self._units: Sequence[ShardedUnit] = ()
        self._places: dict[int, ShardSlot] = {}
        self._owners: dict[Nodes, Sequence[int]] = {}
        self._arriving: deque[Callable[[], None]] = deque()  # what to do with each, in order

    @property
    def gradients(self) -> list[core.ShardedGradients]:
        """Return the gradients that this rank keeps, by unit."""
        return [unit.gradients for unit in self._units]

    def place(self, param: int) -> ShardSlot | None:
        """Return the slot of a parameter; None: its gradient is not shared."""
        return self._places.get(param)

    def owners(self, nodes: Nodes | None) -> Sequence[int]:
        """Return the ranks in the order of the chunks they own, for transfers between nodes.
        Collective.

        The first ranks of all nodes come first. Empty: the order of the ranks.
        """
        if nodes is None or not self._units:
            return ()
        if nodes not in self._owners:
            mine = (nodes.place, nodes.node)
            places = gather_watched(mine, self._group, "the vote on a plan")
            self._owners[nodes] = sorted(range(len(places)), key=places.__getitem__)
        return self._owners[nodes]

    def take(self, units: Sequence[ShardedUnit]) -> None:
        """Share the gradients of these units, and of no others. Collective the first time."""
        self.connect()
        self._units = list(units)
        self._places = {
            param: ShardSlot(number, member, unit.offsets[member], unit.region)
            for number, unit in enumerate(self._units)
            for member, param in enumerate(unit.params)
        }

    def connect(self) -> None:
        """Prepare to send regions. Collective the first time."""
        if self._links is None and self._memory is None:
            on_cpu = self._device.type == "cpu"
            group = self._group
            self._links = new_cpu_group(group, "shards", self._own) if on_cpu else group
            self._core.use_shards(resolvable_name(self._links))

    def make_statements(self, timeout: float) -> core.SharedStatements | None:
        """Return a barrier at which the ranks exchange numbers; None: they share no memory. Call it
        once.

        Args:
            timeout: seconds that a rank waits for the others.
        """
        return None if self._memory is None else core.SharedStatements(self._memory, 2, timeout)

    def start_gather(self, flat: torch.Tensor, arrived: Callable[[], None]) -> None:
        """Send this rank's region of a buffer, one of equal ones, to all ranks. Collective.

        Args:
            arrived: called once the others' regions are there: by a later call, or by
                `finish_gathers()`.
        """
        if self._group.size() == 1:
            return
        self.connect()
        flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
        under_way = self._core.start_gather(flat)
        self._arriving.append(arrived)
        while len(self._arriving) > under_way:
            self._arriving.popleft()()

    def drop_gathers(self) -> None:
        """Forget the gathers that have been started; none of them is waited for."""
        self._arriving.clear()
        with contextlib.suppress(RuntimeError):
            self._core.finish_gathers()  # ends with the first that fails

    def outlive(self) -> None:
        """Keep the links for good: a message over their group may never end, and their end would
        wait for it.
        """
        if self._links is not None:
            keep_for_good(self._links)

    def finish_gathers(self) -> None:
        """Wait for all gathers that have been started."""
        arriving, self._arriving = self._arriving, deque()
        self._core.finish_gathers()
        for arrived in arriving:
            arrived()
