"""Policies: what the user asked for, checked and frozen."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from fastsync.config.arguments import Zero, check_parameter_wire
from fastsync.config.fault_policies import ElasticPolicy, ReplicaPolicy
from fastsync.config.param_groups import ParamGroup
from fastsync.config.sync_modes import SyncMode
from fastsync.config.topology import Network, Span
from fastsync.wire.formats import FORMATS, LEAST_PIECE_BYTES, PIECE_BYTES, Wire, make_codec

_MIB = 1 << 20
_FIRST_BUCKET_BYTES = _MIB
_DEFAULT_CAP_MB = 25
_MEMORY_CAP_BYTES = 5 * _MIB // 2
# A bucket should spend about this long on the wire, and the last one, which nothing hides, less.
# But a collective has costs of its own.
_BUCKET = Span(seconds=0.005, latencies=10)
_LAST_BUCKET = Span(seconds=0.002, latencies=4)
_LEAST_CAP_BYTES = 4 * _MIB
_PIECE = Span(seconds=0.003, latencies=6)


@dataclass(frozen=True)
class BucketPolicy:
    """Limits on the size of buckets, in bytes of gradients.

    Attributes:
        caps: cap of the first bucket, the second, and so on; the last one holds for the rest. A
            bucket is closed by the gradient that reaches its cap.
        adaptive: the caps are not the user's, and may follow the speed of the network.
        last: bytes that the last bucket should hold at most; those before it grow from there, each
            to as much as follows it, up to their caps. None: as large as their caps.
    """

    caps: tuple[int, ...]
    adaptive: bool = False
    last: int | None = None

    def __post_init__(self) -> None:
        if not self.caps or min(self.caps) <= 0:
            raise ValueError(f"bucket caps must be positive, but got {self.caps} bytes")

    @classmethod
    def from_mb(cls, cap_mb: float | None, caps_mb: Sequence[float] | None = None) -> BucketPolicy:
        """Return the policy for DDP's arguments `bucket_cap_mb` and `bucket_cap_mb_list`, in MiB.

        By default the first bucket is small, so that communication starts early, and the others
        hold 25 MiB, or less where the network turns out to be slow.

        Raises:
            ValueError: a size is not positive.
        """
        for cap in (*(caps_mb or ()), *(() if cap_mb is None else (cap_mb,))):
            if not 0 < cap < math.inf:
                raise ValueError(
                    f"bucket_cap_mb must be a positive number of MiB, but got {cap}; "
                    "leave it out for the default of 25"
                )
        if caps_mb:
            return cls(tuple(max(1, int(cap * _MIB)) for cap in caps_mb))
        if cap_mb is not None:
            return cls((max(1, int(cap_mb * _MIB)),))
        return cls((_FIRST_BUCKET_BYTES, _DEFAULT_CAP_MB * _MIB), adaptive=True)

    def on(self, network: Network) -> BucketPolicy:
        """Smaller buckets for a slow network, the smallest at the end, where their time shows.

        Args:
            network: as it carries bytes of gradients.
        """
        if not self.adaptive or not network.known:
            return self
        cap = network.carries(_BUCKET, _LEAST_CAP_BYTES, self.caps[-1])
        last = network.carries(_LAST_BUCKET, _FIRST_BUCKET_BYTES, cap)
        return replace(self, caps=(*self.caps[:-1], cap), last=last)

    def in_memory(self, masters: bool) -> BucketPolicy:
        """Return the policy for ranks that share memory and gradients.

        A collective costs little there, and its buffers are most of what a step needs for a while.
        With `masters` those of a bucket's step are twice as large as its gradients.
        """
        if not self.adaptive:
            return self
        most = _MEMORY_CAP_BYTES // (2 if masters else 1)
        return replace(self, caps=tuple(min(cap, most) for cap in self.caps))

    def limit(self, closed: int, left: int) -> int:
        """Return the bytes that close a bucket after `closed` others, with
        `left` in it or to come.
        """
        cap = self.caps[min(closed, len(self.caps) - 1)]
        return cap if self.last is None else min(cap, max(self.last, left // 2))


@dataclass(frozen=True)
class MixedPolicy:
    """The dtypes of DistributedDataParallel's `mixed_precision`; None leaves them as they are.

    Attributes:
        param: of parameters and inputs in forward and backward.
        reduce: of gradients while they are averaged.
        buffer: of buffers, for good.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None

    @classmethod
    def of(cls, given: object) -> MixedPolicy:
        """Return the policy for the argument: None, or anything with the attributes of
        `_MixedPrecision`.

        Raises:
            TypeError: it is something else.
            ValueError: a dtype is none that the engine can pack.
        """
        if given is None:
            return cls()
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(given, name) for name in names):
            raise TypeError(
                f"mixed_precision must have the attributes {', '.join(names)}, as torch's "
                f"_MixedPrecision has, but is a {type(given).__name__}"
            )
        param, reduce, buffer = (getattr(given, name) for name in names)
        known = tuple(f.native for f in FORMATS.values() if f.native is not None)
        for name, dtype in zip(names, (param, reduce, buffer), strict=True):
            if dtype is not None and dtype not in known:
                choice = ", ".join(map(str, known))
                raise ValueError(f"{name} of mixed_precision is {dtype}; choose one of {choice}")
        return cls(param, reduce or param, buffer)

    def change(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Change a module as DistributedDataParallel does, but for what is named in `ignored`.

        Floating-point buffers are cast for good. Counters, such as those of batch normalisation,
        stay integers; DistributedDataParallel casts them too, against its documentation.

        Parameters get the attributes `_mp_param` and `_fp_param`. The first has the dtype and shape
        in which a parameter takes part in forward and backward, and no memory of its own: the
        engine keeps the values. The second is the parameter as it is stored.
        """
        for name, parameter in module.named_parameters():
            if name in ignored:
                continue
            low = self.param if parameter.is_floating_point() else None
            one = torch.zeros((), dtype=low or parameter.dtype, device=parameter.device)
            extras = {"_mp_param": one.expand(parameter.shape), "_fp_param": parameter.data}
            for attribute, tensor in extras.items():
                setattr(parameter, attribute, tensor)
        for name, buffer in module.named_buffers():
            if self.buffer is not None and name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self.buffer)


@dataclass(frozen=True)
class UnitWires:
    """Formats of the messages of units that ranks share (stage 3).

    Attributes:
        gradients: the format's name or codec, and how it rounds; the rest of a `Wire` is about
            buckets.
        parameters: a format, one of `PARAMETER_WIRES`; None: as they are.

    Raises:
        ValueError: units cannot travel in these formats.
    """

    gradients: Wire = field(default_factory=Wire)
    parameters: str | None = None

    def __post_init__(self) -> None:
        check_parameter_wire(self.parameters)
        if not self.gradients.plain:
            self._check_gradients(self.gradients)

    def _check_gradients(self, wire: Wire) -> None:
        named = f"wire={wire.describe()!r}"
        if not wire.adds_by_parts:
            raise ValueError(
                f"{named} codes whole gradients, and with zero=3 (fully_shard) each rank gets its "
                "share alone; choose a format of blocks, such as 'int8'"
            )
        default = Wire()
        of_buckets = [
            name
            for name in ("overrides", "min_bytes", "warmup_steps", "piece_bytes")
            if getattr(wire, name) != getattr(default, name)
        ]
        if wire.form not in ("auto", "two_shot"):
            of_buckets.append("form")
        if of_buckets:
            raise ValueError(
                f"{named} does not combine with zero=3 (fully_shard), whose units know no "
                f"{', '.join(of_buckets)}; leave that out. Units may have wires of their own: "
                "call fastsync.fully_shard with each one's"
            )
        if wire.feedback_for(make_codec(wire.format)):
            raise ValueError(
                f"{named} has error feedback, which would keep a whole gradient on each rank, and "
                "zero=3 (fully_shard) keeps shares; choose 'int8' or another format without, or "
                "pass error_feedback=False"
            )

    def describe(self) -> str:
        """Return everything that ranks must agree on, in words."""
        parameters = "" if self.parameters is None else f", parameters as {self.parameters}"
        return self.gradients.describe() + parameters


NONFINITE = ("ignore", "skip", "raise")
ON_SKIP = ("raise", "average_others")


@dataclass(frozen=True)
class SyncPolicy:
    """Policy of how gradients travel and where they live.

    Attributes:
        wire: the format of gradients on the wire.
        views: gradients live in the flat buffers where wire and gradient dtype are equal.
        fail_on_unused: a parameter without gradient is an error instead of being handled.
        static_graph: the graph and the set of used parameters never change.
        skip_unused: buckets without any gradient are not sent, which must be the same on all ranks.
        warn_unused: name parameters without gradient in one warning.
        hooked: a communication hook reduces the buffers, so they hold gradients and nothing else.
        mixed: the dtypes of mixed precision.
        network: as it was seen to carry bytes of gradients.
        zero: what the ranks share.
        nonfinite: what a step does with gradients that hold NaN or infinity, one of `NONFINITE`.
        replicas: when they compare what all of them should have; None: never.
        on_skip: what becomes of a step that a rank has no gradients for because it failed, one of
            `ON_SKIP`.
        elastic: how the training goes on when ranks die; None: it ends.
        sync: when ranks average parameters; None: they average gradients, at every step.
        groups: parameters that are averaged over other ranks than the rest.
    """

    wire: Wire = field(default_factory=Wire)
    views: bool = True
    fail_on_unused: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    warn_unused: bool = True
    hooked: bool = False
    mixed: MixedPolicy = MixedPolicy()
    network: Network = field(default_factory=Network)
    zero: Zero = field(default_factory=Zero)
    nonfinite: str = "ignore"
    replicas: ReplicaPolicy | None = None
    on_skip: str = "raise"
    elastic: ElasticPolicy | None = None
    sync: SyncMode | None = None
    groups: tuple[ParamGroup, ...] = ()

    @property
    def named_groups(self) -> list[tuple[dist.ProcessGroup, frozenset[str]]]:
        """Return the process group of each of `groups`, and the names of what it averages."""
        return [(group.process_group, group.names) for group in self.groups]

    @property
    def may_skip(self) -> bool:
        """Return whether ranks count at every step how many ranks have gradients."""
        return self.on_skip == "average_others"

    @property
    def uncapturable(self) -> str:
        """Return what a step in a CUDA graph would lack; empty: nothing."""
        if self.may_skip:
            return "cannot count who has gradients; use on_skip='raise'"
        return "" if self.elastic is None else "does not wait for ranks; leave elastic out"

    @property
    def checks_finite(self) -> bool:
        """Return whether gradients are looked at for NaN and infinity."""
        return self.nonfinite != "ignore"

    @property
    def flagged(self) -> bool:
        """Return whether flags travel with the gradients: which are used, and which are finite."""
        return self.checks_finite or not self.fail_on_unused

    @property
    def in_memory(self) -> bool:
        """Return whether the ranks of one machine may read each other's buckets."""
        return self.wire.shared_memory and not self.hooked

    @property
    def shardable(self) -> bool:
        """Return whether ranks may each keep a part of the averages, which is
        lost with its rank.
        """
        mixed = self.mixed.param is not None
        return self.wire.adds_by_parts and not self.hooked and not mixed and self.elastic is None

    @property
    def reduces_always(self) -> bool:
        """Return whether gradients are reduced after every backward, `no_sync()` or not."""
        return self.zero.stage == 2 and self.shardable

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            raise ValueError(
                f"nonfinite must be one of {', '.join(NONFINITE)}, but is {self.nonfinite!r}"
            )
        if self.zero.stage == 3:
            UnitWires(self.wire, self.zero.parameter_wire)
        if self.on_skip not in ON_SKIP:
            raise ValueError(
                f"on_skip must be one of {', '.join(ON_SKIP)}, but is {self.on_skip!r}"
            )


def piece_bytes(wire: Wire, network: Network, device: torch.device) -> int:
    """Return the size of a coded bucket's pieces.

    What is coded before the first piece leaves and decoded after the last one has come adds to
    the step, so pieces are small. On a fast network the costs of a collective count more. On
    devices all pieces of a bucket would follow each other on one stream, where nothing overlaps
    and each costs its launches: there is one.

    Args:
        wire: policy whose `piece_bytes` wins where it is set.
        network: as it carries coded bytes.
        device: of the gradients.
    """
    if wire.piece_bytes is not None:
        return wire.piece_bytes
    if device.type != "cpu":
        return sys.maxsize
    if not network.known:
        return PIECE_BYTES
    return network.carries(_PIECE, LEAST_PIECE_BYTES, PIECE_BYTES)
