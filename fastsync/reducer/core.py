"""The one caller of the C++ extension: typed access to it, and plans turned into its specs.

`fastsync/_C.pyi` says what the extension holds. `bucket_spec` turns a planned bucket into what the
reducer takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fastsync._build import extension
from fastsync._build.recipe import BuildError
from fastsync._torch import backend_name, resolvable_name
from fastsync.config.policy import SyncPolicy
from fastsync.faults.node_links import Nodes
from fastsync.faults.sync_fault import SyncFault
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
else:

    class _Extension:
        """Loads the extension when it is asked for something; the first time may compile it."""

        def __getattr__(self, name):
            return getattr(extension.load(), name)

    _C = _Extension()

__all__ = [
    "MemoryAddress",
    "Sender",
    "all_finite",
    "bucket_spec",
    "check_backend",
    "coded_spec",
    "decode",
    "device_problem",
    "digests",
    "encode",
    "load",
    "make_collective",
    "make_memory",
    "make_precision",
    "make_reducer",
    "make_sharded_gradients",
    "make_timeline",
    "make_unit",
    "make_unit_gradients",
    "make_unit_layout",
    "make_unit_links",
    "make_unit_log",
    "make_unit_name",
    "make_unit_peers",
    "make_watch",
    "make_words",
    "process_has_ended",
    "square_sums",
]


# Where other processes find a rank's memory.
MemoryAddress = tuple[int, int, int, int]
# A format's name, and the elements of what it codes.
CodePlan = tuple[str, int]


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
        if problem := device_problem(device):
            raise BuildError(f"fastsync: {problem}")


def device_problem(device: torch.device) -> str:
    """Return why the kernels cannot run on `device`, with the remedy; empty where they can."""
    return _C.device_problem(str(device))


def make_precision(params: Sequence[torch.Tensor], compute: torch.dtype) -> Precision:
    """Return an object that exchanges `params` for copies of dtype `compute`
    while a forward runs.
    """
    return _C.Precision(params, compute)


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


def square_sums(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The sum of the squares of each tensor's elements, on a CPU.

    In fp64, and the same on every rank that has the same elements, however many threads it has.
    """
    return _C.square_sums(tensors)


def all_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return which tensors hold neither NaN nor infinity; the host waits for the answer."""
    return _C.all_finite(tensors)


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return 64 bits of each dense tensor that differ where its elements differ, bit for bit.

    Equal on all ranks that have the same elements, however these lie in memory.
    """
    return _C.digests(tensors)


def encode(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], payload: torch.Tensor, plan: CodePlan
) -> None:
    """Write the code of tensors to `payload`, each element rounded to the nearest.

    Args:
        tensors: of fp32 or 16 bits, dense.
        offsets: where each begins among the elements of the plan, at a multiple of the block.
        payload: uint8, as many as the plan's elements take, up to a multiple of 16.
        plan: the format's name, and how many elements, a multiple of the block.
    """
    _C.encode(tensors, offsets, payload, plan, 1.0)


def decode(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], payload: torch.Tensor, plan: CodePlan
) -> None:
    """Write to tensors what `payload` stands for; see `encode`. Every rank gets the same bits."""
    _C.decode(tensors, offsets, payload, plan)


def make_memory(size: int) -> SharedMemory:
    """Memory of this rank that others can map, of `size` bytes at most.

    Raises:
        RuntimeError: the system has none.
    """
    return _C.SharedMemory(size)


def make_collective(memory: SharedMemory, channel: int) -> SharedCollective:
    """Return synchronous collectives of the ranks that share `memory`.

    Args:
        channel: 0 or 1; no other user of the memory has the same.
    """
    return _C.SharedCollective(memory, channel)


def make_words(memory: SharedMemory, timeout: float) -> SharedStatements:
    """Return a barrier of the ranks that share `memory`, at which they also exchange a number.

    Make one for each memory.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    return _C.SharedStatements(memory, 2, timeout)


def make_sharded_gradients(
    shard: torch.Tensor,
    params: Sequence[torch.Tensor],
    proxies: list[torch.Tensor],
    release: Callable[[int], None],
) -> ShardedGradients:
    """Return the part of a unit's gradients that one rank keeps.

    Args:
        shard: memory of its averages, one-dimensional.
        params: its members.
        proxies: tensors that become `param.grad`, by member. The list is read at every use, so a
            proxy that is replaced in it is replaced in the result, too.
        release: called with a member's position when its proxy is still referenced and its values
            are about to be overwritten.
    """
    return _C.ShardedGradients(shard, params, proxies, release)


def make_timeline(capacity: int, device: torch.device) -> Timeline:
    """A ring of `capacity` marks, of buckets on `device`.

    Raises:
        ValueError: there is no room for a mark.
    """
    return _C.Timeline(capacity, str(device))


def make_unit_links(group: dist.ProcessGroup, memory: SharedMemory | None, mark: int) -> UnitLinks:
    """Return what units whose shares lie on the ranks of `group` have in common. Collective with
    `memory`.

    Args:
        memory: memory that these ranks share, for their messages alone.
        mark: bytes that their pool keeps to, unless one unit alone needs more.
    """
    return _C.UnitLinks(resolvable_name(group), memory, mark)


def make_unit_log() -> UnitLog:
    """Return a log of the units of one model, step by step."""
    return _C.UnitLog()


def make_unit_peers(rank: int) -> UnitPeers:
    """Return an object that counts and watches collectives that Python starts.

    Args:
    """
    return _C.UnitPeers(rank)


def make_unit_name(number: int, words: str, parameters: Sequence[str]) -> UnitName:
    """Return the name of a unit in messages and timelines.

    Args:
        number: its position among the units of the model.
        words: the unit, as an error names it.
        parameters: names of the unit's parameters.
    """
    return _C.UnitName(number, words, parameters)


def make_unit(
    links: UnitLinks,
    members: Sequence[tuple[Sequence[int], int, int]],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
    tag: int,
) -> Unit:
    """Parameters that come and go together.

    Args:
        members: sizes, the dimension that is cut, and the first element among all whole members.
        dtypes: in which shares are stored, whole members compute, and gradients are reduced.
        tag: even, and no other unit's.
    """
    return _C.Unit(links, members, dtypes, str(device), tag)


def make_unit_gradients(unannounced: Callable[[], None]) -> UnitGradients:
    """Return what watches the gradients of unsharded parameters.

    Args:
        unannounced: called in a backward that comes to such a parameter unannounced, before the
            gradient is accumulated.
    """
    return _C.UnitGradients(unannounced)


def make_unit_layout(
    places: Sequence[tuple[int, int, bool]],
    chunk: int,
    packed: int,
    flags: int,
    codes: CodedSpec | None = None,
) -> UnitLayout:
    """Return the layout of shares: member, first element, and whether it travels by itself.

    Args:
        codes: codes that a chunk travels as; None: raw elements.
    """
    return _C.UnitLayout(places, chunk, packed, flags, codes)


def process_has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended, or is about to."""
    return _C.process_has_ended(process)


def make_watch(
    host: str, warn_after: float, lost_after: float, stack_file: int, stack_signal: int
) -> FaultWatch:
    """Return a fault watch, which tells the other ranks of this one's end and learns of theirs.

    It listens on construction.

    Args:
        host: address of this machine to listen on.
        warn_after: seconds after which a rank that waits warns of the others.
        lost_after: seconds after which a machine that acknowledges nothing is lost.
        stack_file: file to which a handler of `stack_signal` writes the Python stack of its thread;
            -1: there is none.

    Raises:
        RuntimeError: it cannot listen there.
    """
    return _C.FaultWatch(host, warn_after, lost_after, stack_file, stack_signal, SyncFault)


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
