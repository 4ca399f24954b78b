"""How long collectives take: latency and rate of each class of link, ring and tree.

[Note: the model of a collective]
A collective of M bytes among N ranks on n nodes takes a latency and M over a rate. For NCCL, these
are those of the fastest of its algorithms and protocols, as its own tuning picks them
(src/graph/tuning.cc), where l is the latency of a hop inside a node and L of one between nodes:

    ring   base + [S - s] l + s L + f M / B     S = 2(N-1) and s = 2(n-1) steps
    tree   base + 2 [(N/n - 1) l + log2 n L] + 2 M / (0.92 B)

with f = 2(N-1)/N. Reduce-scatter and all-gather are half a ring. Each protocol has latencies of its
own and carries a share of the rate: LL half of it, LL128 120/128. B is the rate at which a rank's
data crosses the narrowest place: the link inside a node, or all links of a node together towards
the next, since NCCL has a ring for each of them. Gloo has a ring over TCP, which is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["Cluster", "Collective", "Link", "collective_seconds", "hop_beside_base", "sent_bytes"]

_US = 1e-6
# Microseconds by protocol (LL, LL128, Simple), and the share of the rate that it carries.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_ALPHA = {
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pci": (1.0, 2.5, 5.7), "net": (2.7, 4.0, 14.0)},
    "tree": {"nvlink": (0.6, 1.25, 4.0), "pci": (1.0, 1.9, 4.0), "net": (5.0, 8.5, 14.0)},
}
_SHARE = {"ring": (0.5, 120 / 128, 1.0), "tree": (1 / 3.8, 120 / 128, 0.92)}
# What LL carries at most, whatever the link, bytes per second inside a node and between nodes.
_MOST_OF_LL = (141e9, 35e9)

Collective = str  # "all_reduce", "reduce_scatter", "all_gather" or "all_to_all"
_ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Link:
    """A class of links.

    Attributes:
        rate: bytes per second that a rank sends over it, at best.
        latency: seconds of a hop; None: as NCCL's table has it for `kind`.
        kind: "nvlink", "pci" or "net".
        reach: share of the rate that collectives get.
        scatter: share of that which over Gloo those get that are no all-reduce: a message from
            every rank to every other at once, where all-reduces are a ring.
    """

    rate: float
    latency: float | None = None
    kind: str = "nvlink"
    reach: float = 1.0
    scatter: float = 1.0

    @property
    def reached(self) -> float:
        """Bytes per second that collectives get."""
        return self.rate * self.reach

    def alpha(self, algorithm: str, protocol: int) -> float:
        """Seconds of a hop."""
        if self.latency is not None:
            return self.latency
        return _ALPHA[algorithm][self.kind][protocol] * _US


@dataclass(frozen=True)
class Cluster:
    """Ranks, and what lies between them.

    Attributes:
        world: ranks.
        per_node: of them on each node.
        backend: "nccl" or "gloo".
    """

    world: int
    per_node: int
    intra: Link
    inter: Link
    backend: str = "nccl"

    def __post_init__(self) -> None:
        if self.world > self.per_node and self.world % self.per_node:
            raise ValueError(
                f"{self.world} GPUs do not fill nodes of {self.per_node}; choose --gpus as a "
                "multiple of --per-node"
            )

    @property
    def nodes(self) -> int:
        return max(1, self.world // self.per_node)

    def of(self, world: int) -> Cluster:
        """The same with other ranks; fewer than a node holds share one."""
        return replace(self, world=world)

    def node(self) -> Cluster:
        """The ranks of one node."""
        return self.of(min(self.world, self.per_node))

    def across(self) -> Cluster:
        """One rank of each node, while the node's others send as well."""
        return Cluster(self.nodes, 1, self.intra, self.inter, self.backend)

    @property
    def rate(self) -> float:
        """Bytes per second where it is narrowest."""
        if self.nodes == 1:
            return self.intra.reached
        between = self.inter.reached * min(self.per_node, self.world)
        return between if self.per_node == 1 else min(self.intra.reached, between)


def _factor(kind: Collective, world: int) -> float:
    """Bytes that a rank sends per byte of the whole."""
    return _ROUNDS[kind] * (world - 1) / world


def sent_bytes(kind: Collective, nbytes: float, world: int) -> float:
    """Bytes that a rank sends for a collective over `nbytes`, the gathered size of gathers."""
    return nbytes * _factor(kind, world)


def collective_seconds(kind: Collective, nbytes: float, cluster: Cluster) -> float:
    """What a collective takes.

    Args:
        nbytes: of the whole: of what is reduced, or of what all ranks have after a gather.
    """
    if cluster.world == 1 or nbytes == 0:
        return 0.0
    if cluster.backend == "gloo":
        return _over_tcp(kind, nbytes, cluster)
    times = [_ring(kind, nbytes, cluster, protocol) for protocol in range(3)]
    if kind == "all_reduce":
        times += [_tree(nbytes, cluster, protocol) for protocol in range(3)]
    return min(times)


def _over_tcp(kind: Collective, nbytes: float, cluster: Cluster) -> float:
    link = cluster.intra if cluster.nodes == 1 else cluster.inter
    steps = _ROUNDS[kind] * (cluster.world - 1)
    rate = cluster.rate * (1.0 if kind == "all_reduce" else link.scatter)
    return steps * (link.latency or 0.0) + _factor(kind, cluster.world) * nbytes / rate


def hop_beside_base(latency: float, ranks: int) -> float:
    """Seconds of a hop without its share of what every all-reduce of NCCL takes beside hops."""
    return max(0.0, latency - _US * min(_BASE["ring"]) / (2 * (ranks - 1)))


def _carried(algorithm: str, protocol: int, cluster: Cluster) -> float:
    rate = cluster.rate * _SHARE[algorithm][protocol]
    return min(rate, _MOST_OF_LL[cluster.nodes > 1]) if protocol == 0 else rate


def _ring(kind: Collective, nbytes: float, cluster: Cluster, protocol: int) -> float:
    steps = _ROUNDS[kind] * (cluster.world - 1)
    between = _ROUNDS[kind] * (cluster.nodes - 1)
    latency = (
        _BASE["ring"][protocol] * _US
        + (steps - between) * cluster.intra.alpha("ring", protocol)
        + between * cluster.inter.alpha("ring", protocol)
    )
    return latency + _factor(kind, cluster.world) * nbytes / _carried("ring", protocol, cluster)


def _tree(nbytes: float, cluster: Cluster, protocol: int) -> float:
    inside = cluster.world // cluster.nodes - 1
    latency = _BASE["tree"][protocol] * _US + 2 * (
        inside * cluster.intra.alpha("tree", protocol)
        + math.floor(math.log2(cluster.nodes)) * cluster.inter.alpha("tree", protocol)
    )
    return latency + 2 * nbytes / _carried("tree", protocol, cluster)
