"""Devices and the links between them: data sheets, and how long collectives take.

[Note: the model of a collective]
A collective of M bytes among N ranks on n nodes takes a latency and M over a rate. For NCCL, these
are those of the fastest of its algorithms and protocols, as its own tuning picks them
(src/graph/tuning.cc), where l is the latency of a hop inside a node and L of one between nodes:

    ring   base + [S - s] l + s L + f M / B     S = 2(N-1) and s = 2(n-1) steps
    tree   base + 2 [(N/n - 1) l + log2 n L] + 2 M / (0.92 B)

with f = 2(N-1)/N. Reduce-scatter and all-gather are half a ring. Each protocol has latencies of its
own and carries a share of the rate: LL half of it, LL128 120/128. B is the rate at which a rank's
data crosses the narrowest place: the link inside a node, or all links of a node together towards
the next, since NCCL has a ring for each of them. Gloo has a ring over TCP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

_TERA = 1e12
_US = 1e-6
# Microseconds by protocol (LL, LL128, Simple), and the share of the rate that it carries.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_ALPHA = {
    "ring": {"nvlink": (0.6, 1.9, 3.4), "net": (2.7, 4.0, 14.0)},
    "tree": {"nvlink": (0.6, 1.25, 4.0), "net": (5.0, 8.5, 14.0)},
}
_SHARE = {"ring": (0.5, 120 / 128, 1.0), "tree": (1 / 3.8, 120 / 128, 0.92)}
# What LL carries at most, whatever the link, bytes per second inside a node and between nodes.
_MOST_OF_LL = (141e9, 35e9)
_ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
# Shares of the link's rate that NCCL counts on in its own tables: 370 of 450 GB/s on an H100, 240
# of 300 on an A100; networks come closer.
_NVLINK_REACH, _NET_REACH = 0.82, 0.92
_LOCAL, _SLOW = 1e9, 1.25e9  # bytes per second of Gloo inside a machine, and of 10 Gbit/s
_TCP_LATENCY = 50e-6


@dataclass(frozen=True)
class Device:
    """An accelerator by its maker's data sheet, dense, without sparsity.

    Attributes:
        narrow: floating-point operations per second in 16 bits; `wide`: in 32 (TF32 if it has it).
        bandwidth: bytes per second of its memory.
        memory: bytes.
        intra, inter: bytes per second of its link inside a node, and between nodes.
        framework: bytes that context, libraries and the backend's channels hold. Users have
            reported 0.3 to 0.5 GB for a process with PyTorch (pytorch/pytorch#107667, #81257), and
            for NCCL 0.7 GB on four A100 (NVIDIA/nccl#964), 1.1 GB on eight H100
            (NVIDIA/nccl#1685).
        efficiency: share of the peak that matrix products of well-tuned training reach.
        streaming: share of the bandwidth that other operators reach.
    """

    name: str
    narrow: float
    wide: float
    bandwidth: float
    memory: float
    intra: float
    inter: float
    framework: float = 1.5e9
    efficiency: float = 0.5
    streaming: float = 0.8

    @property
    def code_rate(self) -> float:
        """Bytes of gradients per second in a pass of coding."""
        return self.bandwidth * self.streaming

    @property
    def on_cpu(self) -> bool:
        """Return whether fastsync treats it as a CPU."""
        return self.name == "cpu"

    def peak(self, dtype: torch.dtype) -> float:
        """Return the operations per second on numbers of this dtype."""
        return self.narrow if dtype.itemsize == 2 else self.wide

    def seconds(self, work: float, moved: float, dtype: torch.dtype) -> float:
        """Return the seconds of an operator: the longer of its arithmetic and its memory
        traffic."""
        arithmetic = work / (self.peak(dtype) * self.efficiency)
        return max(arithmetic, moved / (self.bandwidth * self.streaming))


DEVICES = {
    "v100": Device("v100", 125 * _TERA, 15.7 * _TERA, 0.9 * _TERA, 32e9, 150e9, 12.5e9),
    "a100": Device("a100", 312 * _TERA, 156 * _TERA, 2.039 * _TERA, 80e9, 300e9, 25e9),
    "a100-40": Device("a100-40", 312 * _TERA, 156 * _TERA, 1.555 * _TERA, 40e9, 300e9, 25e9),
    "h100": Device("h100", 989 * _TERA, 494 * _TERA, 3.35 * _TERA, 80e9, 450e9, 50e9),
    "h200": Device("h200", 989 * _TERA, 494 * _TERA, 4.8 * _TERA, 141e9, 450e9, 50e9),
    "b200": Device("b200", 2250 * _TERA, 1100 * _TERA, 8.0 * _TERA, 180e9, 900e9, 50e9),
    "cpu": Device("cpu", 3e10, 3e10, 1e10, 16e9, _LOCAL, 50e9, framework=0.0),
}


def device_named(name: str) -> Device:
    """Return one of `DEVICES`, in any case.

    Raises:
        ValueError: there is none of that name.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise ValueError(f"unknown --device {name!r}; choose one of {', '.join(DEVICES)}")
    return device


@dataclass(frozen=True)
class Link:
    """A class of links.

    Attributes:
        rate: bytes per second that a rank sends over it, at best.
        latency: seconds of a hop; None: as NCCL's table has it for `kind`.
        kind: "nvlink" or "net".
        reach: share of the rate that collectives get.
    """

    rate: float
    latency: float | None = None
    kind: str = "nvlink"
    reach: float = 1.0

    @property
    def reached(self) -> float:
        """Bytes per second that collectives get."""
        return self.rate * self.reach

    def alpha(self, algorithm: str, protocol: int) -> float:
        """Return the seconds of a hop."""
        if self.latency is not None:
            return self.latency
        return _ALPHA[algorithm][self.kind][protocol] * _US


@dataclass(frozen=True)
class Cluster:
    """Ranks, and what lies between them.

    Attributes:
        world: number of ranks; `per_node`: those on each node.
        backend: "nccl" or "gloo".
    """

    world: int
    per_node: int
    intra: Link
    inter: Link
    backend: str = "nccl"

    @property
    def nodes(self) -> int:
        return max(1, self.world // self.per_node)

    def of(self, world: int) -> Cluster:
        """Return the same with another number of ranks; fewer than a node holds share one."""
        return replace(self, world=world)

    def across(self) -> Cluster:
        """Return one rank of each node, while the node's others send as well."""
        return Cluster(self.nodes, 1, self.intra, self.inter, self.backend)

    @property
    def rate(self) -> float:
        """Bytes per second at the narrowest place."""
        if self.nodes == 1:
            return self.intra.reached
        between = self.inter.reached * min(self.per_node, self.world)
        return between if self.per_node == 1 else min(self.intra.reached, between)


def links_of(device: Device, backend: str, latency: float | None) -> tuple[Link, Link]:
    """Return the links inside a node and between nodes, by data sheet.

    Args:
        latency: seconds of a hop; None: NCCL's tables, or the usual one of TCP.
    """
    if backend == "gloo":
        hop = _TCP_LATENCY if latency is None else latency
        return Link(device.intra, hop, "net"), Link(_SLOW, hop, "net")
    intra = Link(device.intra, latency, "nvlink", _NVLINK_REACH)
    return intra, Link(device.inter, latency, "net", _NET_REACH)


def sent_bytes(kind: str, nbytes: float, world: int) -> float:
    """Return the bytes that a rank sends in a collective over `nbytes`; of gathers, the whole
    size."""
    return nbytes * _ROUNDS[kind] * (world - 1) / world


def collective_seconds(kind: str, nbytes: float, cluster: Cluster) -> float:
    """Return the seconds of a collective.

    Args:
        kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
        nbytes: of the whole: of what is reduced, or of what all ranks have after a gather.
    """
    world = cluster.world
    if world == 1 or nbytes == 0:
        return 0.0
    steps, sent = _ROUNDS[kind] * (world - 1), sent_bytes(kind, nbytes, world)
    if cluster.backend == "gloo":
        link = cluster.intra if cluster.nodes == 1 else cluster.inter
        return steps * (link.latency or 0.0) + sent / cluster.rate
    between = _ROUNDS[kind] * (cluster.nodes - 1)
    inside, levels = world // cluster.nodes - 1, math.floor(math.log2(cluster.nodes))
    times = []
    for protocol in range(3):
        hops = (steps - between) * cluster.intra.alpha("ring", protocol)
        hops += between * cluster.inter.alpha("ring", protocol)
        latency = _BASE["ring"][protocol] * _US + hops
        times.append(latency + sent / _carried("ring", protocol, cluster))
        if kind == "all_reduce":
            hops = inside * cluster.intra.alpha("tree", protocol)
            hops += levels * cluster.inter.alpha("tree", protocol)
            latency = _BASE["tree"][protocol] * _US + 2 * hops
            times.append(latency + 2 * nbytes / _carried("tree", protocol, cluster))
    return min(times)


def _carried(algorithm: str, protocol: int, cluster: Cluster) -> float:
    """Return the bytes per second that a protocol carries."""
    rate = cluster.rate * _SHARE[algorithm][protocol]
    return min(rate, _MOST_OF_LL[cluster.nodes > 1]) if protocol == 0 else rate
