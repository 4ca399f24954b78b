"""Process groups of fastsync's own, beside the one whose ranks average their gradients.

Each link of a coded bucket's chain has a process group of its own (csrc/comm/worker.h says why).
torch makes a group by waiting for all of its ranks, as long as the group's timeout says. So the
ranks meet first, in a collective that ends for who waits once another rank has; and whoever makes
the group looks out for ranks that end meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from fastsync.engine.watch import come_together, lend_watch, looks_out, watched_call
from fastsync.ranks.links import Nodes
from fastsync.ranks.meeting import needing_store
from fastsync.torch_private import cpu_backend, group_timeout, is_apart, make_beside
from fastsync.wire.formats import Wire

__all__ = ["make_links", "new_cpu_group", "new_part"]


def make_links(
    group: dist.ProcessGroup, wire: Wire, nodes: Nodes | None, device: torch.device
) -> list[dist.ProcessGroup]:
    """The process groups of a chain's links, in order. Collective.

    On a device with streams all links are enqueued at once, in one order on every rank, so that
    links between the same ranks may share a group. On a CPU collectives are started by the thread
    that runs the backward, but exchanges and whatever follows the first link by threads of each
    model: those need groups that no other model uses.
    """
    streams = device.type != "cpu"
    if nodes is None:
        if streams:
            return [group, group]
        ranks = dist.get_process_group_ranks(group)
        return [_new_group(group, ranks, purpose) for purpose in ("codes", "codes of sums")]
    node = wire.node_group or _new_group(group, nodes.node_ranks, "inside a node")
    if streams:
        cross = wire.cross_group or _new_group(group, nodes.cross_ranks, "between nodes")
        return [node, cross, cross, node]
    return [
        node,
        _new_group(group, nodes.cross_ranks, "between nodes"),
        _new_group(group, nodes.cross_ranks, "between nodes, on the way back"),
        _new_group(group, nodes.node_ranks, "inside a node, on the way back"),
    ]


def new_cpu_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """Another process group of the same ranks, for CPU tensors and nobody else. Collective."""
    ranks = dist.get_process_group_ranks(group)
    return _new_group(group, ranks, purpose, backend=cpu_backend(group))


def new_part(group: dist.ProcessGroup, number: int, purpose: str) -> dist.ProcessGroup:
    """A process group of `number` ranks that follow each other in `group`. Collective."""
    begin = group.rank() // number * number
    ranks = dist.get_process_group_ranks(group)[begin : begin + number]
    return _new_group(group, ranks, purpose)


def _new_group(
    group: dist.ProcessGroup, ranks: Sequence[int], purpose: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Of some `ranks` of `group`, all of whose ranks make one.

    Raises:
        SyncFault: a rank of `group` has ended, or has not made it within the group's timeout.
    """
    make: Callable[[], dist.ProcessGroup] = partial(
        dist.new_group,
        list(ranks),
        timeout=group_timeout(group),
        backend=backend or dist.get_backend(group),
        use_local_synchronization=True,
        group_desc=f"fastsync: {purpose}",
    )
    if is_apart(group) and len(ranks) == group.size():
        make = partial(make_beside, group, purpose)
    if not looks_out(group):
        return make()
    place = f"the making of a process group ({purpose})"
    come_together(group, place)
    with needing_store(group, place):
        # torch itself waits five times as long for a rank that is stopped.
        made = watched_call(group, place, make, within=group_timeout(group))
    lend_watch(made, group)
    return made
