"""Routes of gradients beside the process group itself: shared memory, and groups for pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain

import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import is_registered, keep_for_good, set_group_timeout
from fastsync.config.policy import SyncPolicy
from fastsync.faults.node_links import Nodes, find_nodes
from fastsync.reducer import core
from fastsync.reducer.process_groups import OwnGroups, make_links, new_cpu_group
from fastsync.reducer.reports import Counters
from fastsync.reducer.shared_memory import share_memory
from fastsync.reducer.unused_parameters import NamedParam
from fastsync.wire.formats import Wire


class Routes:
    """Routes of one engine, each made when it is first needed, on all ranks alike.

    Args:
        reducer: the reducer that uses them.
        params: parameters whose gradients travel.
        number: which of the reducer's groups travels over them.

    Attributes:
        nodes: this rank's place in the hierarchical form; None in the others, and where each node
            has one rank.
        memory: of the ranks, where they are on one machine.
    """

    def __init__(
        self, reducer: core.Reducer, params: Sequence[NamedParam], number: int = 0
    ) -> None:
        self._core, self._own, self._number = reducer, OwnGroups(), number
        self._own.end_with(reducer)
        self._device = params[0].tensor.device
        self._nbytes = sum(p.tensor.nbytes for p in params)
        self._on_cpu = all(p.tensor.device.type == "cpu" for p in params)
        self._links: dict[Nodes | None, list[dist.ProcessGroup]] = {}
        self._linked: Sequence[str] = ()  # names of those that the reducer has
        self._node_memory: dict[Nodes, core.SharedMemory | None] = {}
        self._own_group: dist.ProcessGroup | None = None  # for used flags beside a hook
        self.nodes: Nodes | None = None
        self._lone = False  # each node has one rank
        self.memory: core.SharedMemory | None = None

    def use_group(self, group: dist.ProcessGroup, policy: SyncPolicy) -> None:
        """Use the ranks of `group` from now on. Collective."""
        if policy.elastic is not None:
            for link in self._all_links():
                keep_for_good(link)  # ranks may have died in what travels over it
        self._group = group
        self.memory = self._share_memory(group, policy)
        self._core.use_memory(self.memory, self._number)
        self.find_nodes(policy.wire)
        self._links, self._linked, self._own_group = {}, (), None

    def find_nodes(self, wire: Wire) -> None:
        """Find the nodes for gradients that travel as `wire` from now on."""
        nodes = find_nodes(wire, self._group, Env.read().local_ranks)
        # Nodes of one rank have nothing to sum first: codes travel between all ranks.
        self._lone = nodes is not None and len(nodes.node_ranks) == 1
        self.nodes = None if self._lone else nodes

    def counters(self) -> Counters:
        """Return the reducer's counters, which count what leaves a node where several ranks share
        one.
        """
        counters = self._core.stats()
        if self._lone:
            counters["between_nodes_bytes"] = counters["sent_bytes"]
        return counters

    def _share_memory(
        self, group: dist.ProcessGroup, policy: SyncPolicy
    ) -> core.SharedMemory | None:
        """Memory of the ranks of `group`, where they are on one machine. Collective."""
        if not policy.in_memory or not self._on_cpu:
            return None
        return share_memory(group, self._nbytes)

    def make_pipelines(self, policy: SyncPolicy) -> None:
        """Prepare the reducer to send coded buckets. Collective the first time."""
        if self.nodes not in self._links:
            links = make_links(self._group, policy.wire, self.nodes, self._device, self._own)
            self._links[self.nodes] = links
            if self.nodes is not None:
                self._node_memory[self.nodes] = self._share_memory(links[0], policy)
        names: Sequence[str] = [link.group_name for link in self._links[self.nodes]]
        if self._linked != names:
            self._linked = names
            memory = self._node_memory.get(self.nodes) if self.nodes is not None else None
            self._core.use_pipelines(self._linked, memory, self._number)

    def set_timeout(self, timeout: timedelta) -> None:
        """Collectives of Gloo's in pipelines may take so long from now on."""
        for link in self._all_links():
            set_group_timeout(link, timeout)

    def _all_links(self) -> Iterator[dist.ProcessGroup]:
        return chain.from_iterable(self._links.values())

    def flags_group(self, policy: SyncPolicy) -> str:
        """Return the name of a process group for used flags; empty where none is needed.
        Collective.
        """
        told = policy.static_graph or policy.fail_on_unused
        alone = self._group.size() == 1
        if told or alone or self.memory is not None or self._device.type != "cpu":
            return ""
        if not is_registered(self._group):  # torch makes no groups like it
            return ""
        if self._own_group is None:
            self._own_group = new_cpu_group(self._group, "used flags", self._own)
        return str(self._own_group.group_name)
