"""Process groups that coded buckets travel over, and whether the ranks and the backend suit them.

Each link of a coded bucket's chain has a process group of its own (csrc/comm/worker.h says why).
The hierarchical form sums inside a node first, so its links join the ranks of a node, or the ranks
that have the same place in every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastsync.torch_private import gather_objects, group_timeout
from fastsync.wire.formats import Wire

__all__ = ["Nodes", "check_grid", "find_nodes", "make_links", "new_cpu_group", "new_part"]


@dataclass(frozen=True)
class Nodes:
    """This rank's place in a grid of equal nodes. Ranks are those of the default group.

    Attributes:
        node_ranks: the ranks of this rank's node, in the order of their shards.
        cross_ranks: the ranks that have this rank's place in each node, in the order of the nodes.
        place: of this rank in `node_ranks`.
        node: place of this rank in `cross_ranks`.
    """

    node_ranks: tuple[int, ...]
    cross_ranks: tuple[int, ...]
    place: int
    node: int

    def describe(self) -> str:
        """What all ranks must agree on."""
        return f"{len(self.cross_ranks)} nodes of {len(self.node_ranks)} ranks"


def find_nodes(wire: Wire, group: dist.ProcessGroup, local_ranks: int) -> Nodes | None:
    """The nodes of the hierarchical form; None in the other forms.

    Args:
        local_ranks: LOCAL_WORLD_SIZE, 0 where it is not set.

    Raises:
        ValueError: the ranks of `group` are no such grid, as far as this rank can tell.
    """
    if wire.form != "hierarchical":
        return None
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    if wire.node_group is None:
        node_ranks, cross_ranks = _by_count(ranks, me, local_ranks)
    else:
        node_ranks, cross_ranks = _given(wire, ranks, me)
    return Nodes(node_ranks, cross_ranks, node_ranks.index(me), cross_ranks.index(me))


def _by_count(
    ranks: Sequence[int], me: int, local_ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if local_ranks <= 0:
        raise ValueError(
            "form='hierarchical' must know which ranks share a node: start them with torchrun, "
            "which sets LOCAL_WORLD_SIZE, or pass node_group and cross_group"
        )
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // local_ranks, []).append(rank)
    sizes = [len(node) for node in nodes.values()]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"form='hierarchical' needs nodes of equal size, but with LOCAL_WORLD_SIZE="
            f"{local_ranks} the {len(ranks)} ranks of the process group make nodes of "
            f"{', '.join(map(str, sizes))}; choose another number of ranks, or another form"
        )
    mine = nodes[me // local_ranks]
    return tuple(mine), tuple(node[mine.index(me)] for node in nodes.values())


def _given(wire: Wire, ranks: Sequence[int], me: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    node = tuple(dist.get_process_group_ranks(wire.node_group))
    cross = tuple(dist.get_process_group_ranks(wire.cross_group))
    fits = set(node) & set(cross) == {me} and {*node, *cross} <= set(ranks)
    if not fits or len(node) * len(cross) != len(ranks):
        raise ValueError(
            f"node_group has ranks {list(node)} and cross_group {list(cross)} on rank {me}: they "
            f"must have that rank alone in common and span the {len(ranks)} ranks of the process "
            "group as rows and columns of a grid"
        )
    return node, cross


def check_grid(nodes: Nodes, group: dist.ProcessGroup) -> None:
    """Collective: whether all ranks mean the same grid.

    Raises:
        ValueError: they do not; the same on every rank.
    """
    ranks = dist.get_process_group_ranks(group)
    by_rank = dict(zip(ranks, gather_objects(nodes, group), strict=True))
    for rank, its in by_rank.items():
        same_node = all(by_rank[r].node_ranks == its.node_ranks for r in its.node_ranks)
        same_column = all(by_rank[r].cross_ranks == its.cross_ranks for r in its.cross_ranks)
        if not same_node or not same_column:
            raise ValueError(
                f"node_group and cross_group are no grid: rank {rank} has ranks "
                f"{list(its.node_ranks)} and {list(its.cross_ranks)}, others of these have other "
                "ones. Every rank of a node_group or cross_group must pass that same group"
            )
    if any(by_rank[r].place != its.place for its in by_rank.values() for r in its.cross_ranks):
        raise ValueError(
            "node_group and cross_group are no grid: a cross_group must join ranks that have the "
            "same rank in their node_group"
        )


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
    return _new_group(group, dist.get_process_group_ranks(group), purpose, backend="gloo")


def new_part(group: dist.ProcessGroup, number: int, purpose: str) -> dist.ProcessGroup:
    """A process group of `number` ranks that follow each other in `group`. Collective."""
    begin = group.rank() // number * number
    ranks = dist.get_process_group_ranks(group)[begin : begin + number]
    return _new_group(group, ranks, purpose)


def _new_group(
    group: dist.ProcessGroup, ranks: Sequence[int], purpose: str, backend: str | None = None
) -> dist.ProcessGroup:
    made: dist.ProcessGroup = dist.new_group(
        list(ranks),
        timeout=group_timeout(group),
        backend=backend or dist.get_backend(group),
        use_local_synchronization=True,
        group_desc=f"fastsync: {purpose}",
    )
    return made
