"""Ranks that the hierarchical form brings together, and whether they suit it.

It sums inside a node first, so its links join the ranks of a node, or the ranks that have the same
place in every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fastsync._torch import gather_objects
from fastsync.wire.formats import Wire


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
        """Return the description of the grid that all ranks must agree on."""
        return f"{len(self.cross_ranks)} nodes of {len(self.node_ranks)} ranks"


def find_nodes(wire: Wire, group: dist.ProcessGroup, local_ranks: int) -> Nodes | None:
    """Return the nodes of the hierarchical form; None in the other forms.

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
    """Check whether all ranks mean the same grid. Collective.

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
