"""Hierarchical all-reduce: inside each node, then between nodes, with groups of dist.new_group.

Links inside a node are fast, those between nodes are slow and shared. A flat ring over N = K * L
ranks (K nodes of L ranks) sends 2(N-1)/N * M bytes out of every node. Here the ranks of a node
first reduce-scatter among themselves, so that each holds M/L bytes of the node's sum; ranks with
the same place in their nodes then all-reduce those, and the node gathers the result: 2(K-1)/K * M
bytes leave a node. Both forms are made of the sends of examples/ring_allreduce.py, so their bytes
are counted where they are sent, not computed.

    python -m examples.hierarchical --nodes 2 --ranks 4

checks the result against a flat dist.all_reduce, counts the bytes between nodes, and trains a model
with FastDDP whose buckets are averaged this way by a communication hook. Exits with 1 where results
differ. The "nodes" are groups of processes of this machine; under torchrun, the real ones.
"""

# No `from __future__ import annotations`: a hook's annotations must be types, not their names.

import argparse
import os
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from examples.common.ranks import Group, UsageError, argument, run_example, whole
from examples.common.text import render
from examples.ring_allreduce import Ring, all_gather, reduce_scatter, ring_all_reduce, split

STEPS = 5


@dataclass(frozen=True)
class Cluster:
    """The rings that this rank belongs to.

    Attributes:
        node_size: ranks per node; the ranks of a node are consecutive.
        inside: the ranks of this node.
        across: the ranks that have this one's place in their nodes.
    """

    node_size: int
    inside: Ring
    across: Ring

    @classmethod
    def of(cls, node_size: int) -> "Cluster":
        """Collective over all ranks: every rank makes every group, in the same order.

        Raises:
            ValueError: nodes of that size do not divide the ranks.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        if node_size < 1 or world % node_size:
            raise ValueError(f"{world} ranks do not make nodes of {node_size} ranks each")
        nodes = [list(range(at, at + node_size)) for at in range(0, world, node_size)]
        places = [list(range(at, world, node_size)) for at in range(node_size)]
        inside = [dist.new_group(ranks) for ranks in nodes][rank // node_size]
        across = [dist.new_group(ranks) for ranks in places][rank % node_size]
        return cls(node_size, Ring(inside), Ring(across))

    @property
    def nodes(self) -> int:
        return self.across.size

    def sent(self) -> Counter[int]:
        """Bytes that this rank sent, by receiver."""
        return self.inside.sent + self.across.sent

    def between_nodes(self, sent: Counter[int]) -> int:
        """Those of `sent` that leave this rank's node."""
        mine = dist.get_rank() // self.node_size
        return sum(n for receiver, n in sent.items() if receiver // self.node_size != mine)


def hierarchical_all_reduce(tensor: Tensor, cluster: Cluster) -> None:
    """Replaces the contiguous `tensor` by its sum over all ranks, the same bits on each of them."""
    chunks = split(tensor, cluster.inside.size)
    finished = reduce_scatter(cluster.inside, chunks)
    ring_all_reduce(chunks[finished], cluster.across)
    all_gather(cluster.inside, chunks)


def hierarchical_hook(
    cluster: Cluster,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """A communication hook for FastDDP and DDP: averages a bucket node by node."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    hierarchical_all_reduce(buffer, cluster)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave one node in one all-reduce: counted at this rank's node by either form, and
    2(N-1)/N * M and 2(K-1)/K * M. `error` is the largest difference from dist.all_reduce, relative
    to the largest sum of magnitudes."""

    flat: int
    hierarchical: int
    flat_formula: Fraction
    hierarchical_formula: Fraction
    error: float


def compare(group: Group, node_size: int, numel: int) -> Traffic:
    """Reduces the same fp32 tensor in a flat ring, by nodes and by torch."""
    cluster, flat = Cluster.of(node_size), Ring()
    generator = torch.Generator().manual_seed(group.rank)
    tensor = torch.randn(numel, generator=generator).to(group.device)
    expected, magnitudes, by_ring = tensor.clone(), tensor.abs(), tensor.clone()
    dist.all_reduce(expected)
    dist.all_reduce(magnitudes)
    ring_all_reduce(by_ring, flat)
    hierarchical_all_reduce(tensor, cluster)
    left = [cluster.between_nodes(sent) for sent in (flat.sent, cluster.sent())]
    of_node = torch.tensor(left, device=group.device)
    dist.all_reduce(of_node, group=cluster.inside.group)
    apart = max((t - expected).abs().max() for t in (tensor, by_ring))
    k, n = cluster.nodes, group.world
    return Traffic(
        flat=int(of_node[0]),
        hierarchical=int(of_node[1]),
        flat_formula=Fraction(2 * (n - 1) * tensor.nbytes, n),
        hierarchical_formula=Fraction(2 * (k - 1) * tensor.nbytes, k),
        error=float(apart / magnitudes.max()),
    )


def train(group: Group, node_size: int | None) -> Tensor:
    """All weights after STEPS steps of FastDDP; `node_size` has buckets averaged node by node."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(group.device)
    model = fastsync.FastDDP(module, bucket_cap_mb=0.02)
    if node_size is not None:
        model.register_comm_hook(Cluster.of(node_size), hierarchical_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1 + group.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch = torch.randn(32, 64, generator=data).to(group.device)
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def run(args: argparse.Namespace, group: Group) -> int:
    if args.nodes and group.world % args.nodes:
        raise UsageError(f"{group.world} ranks do not make {args.nodes} nodes of equal size")
    real = int(os.environ["LOCAL_WORLD_SIZE"])  # of a node, by torchrun
    size = real if real < group.world else max(1, group.world // 2)
    size = group.world // args.nodes if args.nodes else size
    found = compare(group, size, args.numel)
    by_node, flat = train(group, size), train(group, None)
    apart = float((by_node - flat).abs().max())
    exact = found.error <= (group.world - 1) * torch.finfo(torch.float32).eps
    good = group.all_agree(exact and torch.allclose(by_node, flat, rtol=1e-5, atol=1e-7))
    if group.is_main:
        nodes = group.world // size
        print(f"\n  {nodes} nodes of {size} ranks, {4 * args.numel:,} bytes to sum")
        print("  bytes that leave node 0:\n")
        flat_row = (f"{found.flat:,}", f"{float(found.flat_formula):,.1f}")
        row = (f"{found.hierarchical:,}", f"{float(found.hierarchical_formula):,.1f}")
        rows = (("flat ring", *flat_row), ("by nodes", *row))
        print(render(("form", "counted", "formula"), rows))
        print(f"\n  against dist.all_reduce: error {found.error:.1e} of the largest sum")
        print(f"  FastDDP with the hook, {STEPS} steps: weights differ by {apart:.1e}")
        print(f"  {'equal up to the order of sums' if good else 'DIFFERENT'}")
    return 0 if good else 1


def main() -> int:
    return run_example(
        "hierarchical",
        __doc__,
        run,
        argument("--nodes", "pretended nodes; unset: the real ones, 2 if there is one", type=whole),
        argument("--numel", "fp32 elements", 1_000_000, type=whole),
        ranks=4,
    )


if __name__ == "__main__":
    raise SystemExit(main())
