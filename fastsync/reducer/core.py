"""The one caller of the C++ extension: typed access to it, and plans turned into its specs.

What `fastsync/_C.pyi` says of the extension is an attribute of this module, too, which loads the
extension. `bucket_spec` turns a planned bucket into what the reducer takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fastsync._build import extension
from fastsync._build.recipe import BuildError
from fastsync._torch import backend_name, resolvable_name
from fastsync.config.policy import SyncPolicy
from fastsync.faults.node_links import Nodes
from fastsync.reducer.buckets import CodedPlan, PlannedBucket
from fastsync.wire.formats import Format, TopK, Wire
from fastsync.wire.plugins import PluginCodec

if TYPE_CHECKING:
    from fastsync import _C
    from fastsync._C import CodedSpec as CodedSpec
    from fastsync._C import FaultWatch as FaultWatch
    from fastsync._C import ForwardAdvice as ForwardAdvice
    from fastsync._C import Precision as Precision
    from fastsync._C import Reducer as Reducer
    from fastsync._C import ShardedGradients as ShardedGradients
    from fastsync._C import SharedCollective as SharedCollective
    from fastsync._C import SharedMemory as SharedMemory
    from fastsync._C import SharedStatements as SharedStatements
    from fastsync._C import Timeline as Timeline
    from fastsync._C import Transfer as Transfer
    from fastsync._C import Unit as Unit
    from fastsync._C import UnitGradients as UnitGradients
    from fastsync._C import UnitLayout as UnitLayout
    from fastsync._C import UnitLinks as UnitLinks
    from fastsync._C import UnitLog as UnitLog
    from fastsync._C import UnitName as UnitName
    from fastsync._C import UnitPeers as UnitPeers
    from fastsync._C import WatchedGradient as WatchedGradient
    from fastsync._C import all_finite as all_finite
    from fastsync._C import decode as decode
    from fastsync._C import device_problem as device_problem
    from fastsync._C import digests as digests
    from fastsync._C import encode as encode
    from fastsync._C import process_has_ended as process_has_ended
    from fastsync._C import square_sums as square_sums
else:

    class _Extension:
        """Loads the extension when it is asked for something; the first time may compile it."""

        def __getattr__(self, name):
            return getattr(extension.load(), name)

    _C = _Extension()

    def __getattr__(name):
        if name.startswith("_"):  # Python itself asks for such names
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_C, name)


# Where other processes find a rank's memory.
MemoryAddress = tuple[int, int, int, int]


@dataclass(frozen=True)
class Sender:
    """Inputs of a bucket's spec besides its plan.

    Attributes:
        wire: the policy that the plan was made from.
        rank: this rank, in the process group that averages.
        nodes: this rank's place in the hierarchical form; None in the others.
        gradients: those of the units whose gradients the ranks share, by number.
        owners: the rank that owns each of the chunks in which these travel from node to node, in
            their order. Empty where nodes do not matter: chunks are in the order of the ranks.
    """

    wire: Wire
    rank: int
    nodes: Nodes | None = None
    gradients: Sequence[ShardedGradients] = ()
    owners: Sequence[int] = ()


def load(devices: Iterable[torch.device] = ()) -> None:
    """Load the extension, which may have to be compiled first.

    Raises:
        BuildError: it has to be compiled and cannot be, or its kernels cannot run on one of
            `devices`; the text carries the remedy.
    """
    extension.load()
    for device in devices:
        if problem := _C.device_problem(str(device)):
            raise BuildError(f"fastsync: {problem}")


def make_reducer(
    params: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    names: Sequence[str],
    group: dist.ProcessGroup,
    policy: SyncPolicy,
    precision: Precision | None,
) -> Reducer:
    """Return the C++ reducer of `params`, called `names` in messages, before its first plan.

    Args:
        leaves: the tensors that autograd accumulates into: `params`, or DTensors of these.
    """
    return _C.Reducer(
        params=params,
        names=names,
        group_name=resolvable_name(group),
        static_graph=policy.static_graph,
        fail_on_unused=policy.fail_on_unused,
        skip_unused=policy.skip_unused,
        check_finite=policy.checks_finite,
        may_skip=policy.may_skip,
        precision=precision,
        leaves=leaves,
    )


def check_backend(group: dist.ProcessGroup, device: torch.device, wire: Wire) -> None:
    """Send a few bytes as coded buckets will be sent. Collective.

    Raises:
        ValueError: the backend cannot.
    """
    try:
        _C.probe_links(
            resolvable_name(group),
            str(device),
            all_to_all=wire.form != "gather",
            reduce_scatter=wire.form == "hierarchical",
        )
    except Exception as error:  # whatever a backend throws
        backend = backend_name(group)
        first_line = str(error).splitlines()[0] if str(error) else repr(error)
        raise ValueError(
            f"the backend {backend!r} cannot send gradients as bytes ({first_line}); leave wire "
            "out, choose form='native', or use another backend"
        ) from error


def bucket_spec(index: int, bucket: PlannedBucket, sender: Sender) -> _C.BucketSpec:
    """Bucket number `index` of a plan, as the reducer takes it."""
    layout, plan = bucket.layout, bucket.coded
    return _C.BucketSpec(
        slots=list(zip(bucket.params, layout.offsets, strict=True)),
        numel=layout.numel,
        flags_offset=layout.flags_offset,
        dtype=bucket.dtype,
        views=bucket.views,
        sparse=bucket.sparse,
        coded=None if plan is None else coded_spec(index, plan, sender),
        scatter=_scatter_spec(bucket, sender) if bucket.shards else None,
        group=bucket.group,
    )


def _scatter_spec(bucket: PlannedBucket, sender: Sender) -> _C.ScatterSpec:
    regions, first = bucket.regions, bucket.shards[0]
    assert regions is not None
    in_nodes = bucket.coded is not None and bucket.coded.node_ranks > 1
    owners = (in_nodes and sender.owners) or range(regions.ranks)
    chunk_of = {rank: chunk for chunk, rank in enumerate(owners)}
    spec = _C.ScatterSpec(
        gradients=sender.gradients[first.unit],
        members=[shard.member for shard in bucket.shards],
        first=sender.rank * first.region,
        layout=(regions.ranks, chunk_of[sender.rank], regions.numel, regions.flags),
    )
    for part in regions.parts:
        spec.add_part(part.slot, chunk_of[part.rank], part.begin, part.numel, part.place)
    return spec


def coded_spec(index: int, plan: CodedPlan, sender: Sender) -> _C.CodedSpec:
    """Coded bucket, or unit, number `index`. Its random numbers differ by rank and number."""
    spec = _C.CodedSpec()
    numbers = {f.name: getattr(plan.layout, f.name) for f in fields(plan.layout)}
    spec.lay_out(**{name: value for name, value in numbers.items() if name != "chunks"})
    spec.gather = plan.form == "gather"
    spec.error_feedback = plan.error_feedback
    spec.stochastic = sender.wire.stochastic
    spec.seed = zlib.crc32(f"{sender.wire.seed} {sender.rank} {index}".encode())
    if plan.node_ranks > 1 and sender.nodes is not None:
        nodes = sender.nodes
        spec.node_ranks, spec.node_rank = len(nodes.node_ranks), nodes.place
        spec.nodes, spec.node = len(nodes.cross_ranks), nodes.node
    if isinstance(plan.codec, TopK):
        spec.kept = plan.layout.coded_bytes // 8
    elif isinstance(plan.codec, Format):
        spec.format = plan.codec.name
    elif isinstance(plan.codec, PluginCodec):
        spec.use_plugin(plan.codec.address)
    else:
        spec.use_codec(plan.codec)
    return spec
