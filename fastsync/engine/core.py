"""The one caller of the C++ extension: typed access to it, and plans turned into its specs.

`fastsync/_C.pyi` says what the extension holds. Specs are values here and objects to fill there;
`bucket_spec` is where the one becomes the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist

from fastsync.build import extension
from fastsync.plan.buckets import CodedPlan, PlannedBucket
from fastsync.plan.layout import FlatLayout, LowRankLayout, WireLayout
from fastsync.plan.policy import SyncPolicy
from fastsync.ranks.links import Nodes
from fastsync.torch_private import backend_name, resolvable_name
from fastsync.wire.formats import Format, PowerSGD, TopK, Wire
from fastsync.wire.plugins import PluginCodec

if TYPE_CHECKING:
    from fastsync import _C
    from fastsync._C import Precision as Precision
    from fastsync._C import Reducer as Reducer
    from fastsync._C import Timeline as Timeline
else:

    class _Extension:
        """Loads the extension when it is asked for something; the first time may compile it."""

        def __getattr__(self, name):
            return getattr(extension.load(), name)

    _C = _Extension()

__all__ = [
    "CodedSpec",
    "Counters",
    "LowRankSpec",
    "Sender",
    "StepReport",
    "bucket_spec",
    "check_backend",
    "coded_spec",
    "load",
    "low_rank_spec",
    "make_precision",
    "make_reducer",
    "make_timeline",
    "supports",
]


class Counters(TypedDict):
    """`Reducer.stats()`: of this rank, since the reducer was made; `SyncStats` says what of."""

    steps: int
    plans: int
    collectives: int
    bytes: int
    sent_bytes: int
    between_nodes_bytes: int
    residual_bytes: int
    exposed_seconds: float


class StepReport(TypedDict):
    """`Reducer.last_step()`: times in nanoseconds since the epoch, 0 where it got no so far.

    Keys:
        buckets: how many were sent.
        used: parameters that received a gradient, by index; empty before the first step.
        same_so_far: no step used other parameters than the one before.
        error: of the last call or backward that failed.
    """

    forward_start: int
    forward_end: int
    backward_start: int
    first_send: int
    backward_end: int
    received: int
    buckets: int
    used: list[bool]
    same_so_far: bool
    error: str


@dataclass(frozen=True)
class Sender:
    """What a bucket's spec depends on beside its plan.

    Attributes:
        wire: the policy that the plan was made from.
        rank: this one's, in the process group that averages.
        nodes: this rank's place in the hierarchical form; None in the others.
    """

    wire: Wire
    rank: int
    nodes: Nodes | None = None


@dataclass(frozen=True)
class CodedSpec:
    """A coded bucket, as `struct CodedSpec` in csrc/transport/coded.h describes it."""

    gather: bool
    pieces: int
    chunk_numel: int
    chunk_bytes: int
    coded_bytes: int
    flags_offset: int
    flags_per_chunk: int
    error_feedback: bool
    stochastic: bool
    seed: int
    kept: int = 0
    node_ranks: int = 1
    node_rank: int = 0
    nodes: int = 1
    node: int = 0


@dataclass(frozen=True)
class LowRankSpec:
    """The numbers of a low-rank bucket, as csrc/transport/low_rank.h describes them."""

    numel: int
    first_numel: int
    second_numel: int
    flags_offset: int
    flags: int
    error_feedback: bool
    warm_start: bool
    seed: int


def load() -> None:
    """Loads the extension, which may have to be compiled first.

    Raises:
        BuildError: it has to be compiled and cannot be; the text carries the remedy.
    """
    extension.load()


def supports(device: torch.device) -> bool:
    """Whether this build has kernels for `device`."""
    return _C.supports(str(device))


def make_precision(params: Sequence[torch.Tensor], compute: torch.dtype) -> Precision:
    """What exchanges `params` for copies of dtype `compute` while a forward runs."""
    return _C.Precision(params, compute)


def make_reducer(
    params: Sequence[torch.Tensor],
    names: Sequence[str],
    group: dist.ProcessGroup,
    policy: SyncPolicy,
    precision: Precision | None,
) -> Reducer:
    """The C++ reducer of `params`, called `names` in messages, before its first plan."""
    return _C.Reducer(
        params=params,
        names=names,
        group_name=resolvable_name(group),
        static_graph=policy.static_graph,
        fail_on_unused=policy.fail_on_unused,
        skip_unused=policy.skip_unused,
        precision=precision,
    )


def make_timeline(capacity: int, device: torch.device) -> Timeline:
    """A ring of `capacity` marks, of buckets on `device`.

    Raises:
        ValueError: there is no room for a mark.
    """
    return _C.Timeline(capacity, str(device))


def check_backend(group: dist.ProcessGroup, device: torch.device, wire: Wire) -> None:
    """Sends a few bytes as coded buckets will be sent. Collective.

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
    coded = low_rank = None
    if plan is not None and isinstance(plan.layout, LowRankLayout):
        spec = low_rank_spec(index, layout, plan, sender)
        low_rank = _low_rank_for_core(spec, layout, plan.layout)
    elif plan is not None:
        coded = _coded_for_core(coded_spec(index, plan, sender), plan)
    return _C.BucketSpec(
        slots=list(zip(bucket.params, layout.offsets, strict=True)),
        numel=layout.numel,
        flags_offset=layout.flags_offset,
        dtype=bucket.dtype,
        views=bucket.views,
        sparse=bucket.sparse,
        coded=coded,
        low_rank=low_rank,
    )


def coded_spec(index: int, plan: CodedPlan, sender: Sender) -> CodedSpec:
    """The spec of coded bucket number `index`. Random numbers differ by rank and bucket."""
    layout, nodes = plan.layout, sender.nodes
    assert isinstance(layout, WireLayout)
    grid = {}
    if plan.node_ranks > 1 and nodes is not None:
        grid = {
            "node_ranks": len(nodes.node_ranks),
            "node_rank": nodes.place,
            "nodes": len(nodes.cross_ranks),
            "node": nodes.node,
        }
    return CodedSpec(
        gather=plan.form == "gather",
        pieces=layout.pieces,
        chunk_numel=layout.chunk_numel,
        chunk_bytes=layout.chunk_bytes,
        coded_bytes=layout.coded_bytes,
        flags_offset=layout.flags_offset,
        flags_per_chunk=layout.flags_per_chunk,
        error_feedback=plan.error_feedback,
        stochastic=sender.wire.stochastic,
        seed=zlib.crc32(f"{sender.wire.seed} {sender.rank} {index}".encode()),
        kept=layout.coded_bytes // 8 if isinstance(plan.codec, TopK) else 0,
        **grid,
    )


def low_rank_spec(index: int, slots: FlatLayout, plan: CodedPlan, sender: Sender) -> LowRankSpec:
    """The spec of low-rank bucket number `index`. Every rank begins with the same factors."""
    layout, codec = plan.layout, plan.codec
    assert isinstance(layout, LowRankLayout) and isinstance(codec, PowerSGD)
    return LowRankSpec(
        numel=slots.numel,
        first_numel=layout.first_numel,
        second_numel=layout.second_numel,
        flags_offset=layout.flags_offset,
        flags=layout.flags,
        error_feedback=plan.error_feedback,
        warm_start=codec.warm_start,
        seed=zlib.crc32(f"{sender.wire.seed} {index}".encode()),
    )


def _coded_for_core(spec: CodedSpec, plan: CodedPlan) -> _C.CodedSpec:
    built = _C.CodedSpec()
    _copy(spec, built)
    if isinstance(plan.codec, Format):
        built.format = plan.codec.name
    elif isinstance(plan.codec, PluginCodec):
        built.use_plugin(plan.codec.address)
    elif not spec.kept:
        built.use_codec(plan.codec)
    return built


def _low_rank_for_core(
    spec: LowRankSpec, slots: FlatLayout, layout: LowRankLayout
) -> _C.LowRankSpec:
    built = _C.LowRankSpec()
    _copy(spec, built)
    for matrix in layout.matrices:
        built.add_matrix(
            offset=slots.offsets[matrix.slot],
            sizes=(matrix.rows, matrix.cols),
            rank=matrix.rank,
            places=(matrix.left, matrix.right),
        )
    for slot, place in layout.places:
        built.add_run(offset=slots.offsets[slot], numel=slots.numels[slot], place=place)
    return built


def _copy(spec: CodedSpec | LowRankSpec, built: _C.CodedSpec | _C.LowRankSpec) -> None:
    for field in fields(spec):
        setattr(built, field.name, getattr(spec, field.name))
