"""Codes of a unit: which of its dtype shards travel as codes, and how their chunks do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastsync.config.policy import UnitWires
from fastsync.fsdp.shard_layout import ChunkLayout
from fastsync.reducer import core
from fastsync.reducer.bucket_layout import PayloadLayout, RegionLayout, region_payload
from fastsync.reducer.buckets import CodedPlan, travels_coded
from fastsync.wire.formats import FORMATS, AnyCodec, Wire, make_codec


@dataclass(frozen=True)
class Codes:
    """Codes that chunks travel as.

    Attributes:
        codec: a format, or a codec of the user.
        wire: settings of its rounding.
    """

    codec: AnyCodec
    wire: Wire

    @property
    def block(self) -> int:
        return self.codec.block

    def _payload(self, laid: ChunkLayout, world: int) -> PayloadLayout:
        flags = 0 if laid.flags < 0 else len(laid.params)
        regions = RegionLayout((), laid.values, flags, world, world)
        return region_payload(regions, self.codec.coded_bytes)

    def nbytes(self, laid: ChunkLayout, world: int) -> int:
        """Return the bytes of the chunks of all ranks."""
        return world * self._payload(laid, world).chunk_bytes

    def spec(self, laid: ChunkLayout, world: int, name: str) -> core.CodedSpec:
        """Return the spec of one rank's chunk. Random numbers differ by rank and dtype shard."""
        plan = CodedPlan(self.codec, "scatter", self._payload(laid, world), error_feedback=False)
        number = zlib.crc32(name.encode())
        return core.coded_spec(number, plan, core.Sender(self.wire, dist.get_rank()))


def gradient_codes(
    wires: UnitWires, world: int, dtypes: Sequence[torch.dtype], reduce: torch.dtype
) -> Codes | None:
    """Return what gradients travel as; None: elements of dtype `reduce`.

    Args:
        world: number of ranks that share.
        dtypes: dtypes that shares are stored in, and gradients arrive in.
    """
    if world == 1 or wires.gradients.plain or torch.float64 in dtypes:
        return None
    codec = make_codec(wires.gradients.format)
    return Codes(codec, wires.gradients) if travels_coded(codec, reduce) else None


def parameter_codes(
    wires: UnitWires, world: int, stored: torch.dtype, compute: torch.dtype
) -> Codes | None:
    """Return what parameters travel as; None: elements of dtype `compute`."""
    if world == 1 or wires.parameters is None or stored is torch.float64:
        return None
    format = FORMATS[wires.parameters]
    return Codes(format, Wire()) if travels_coded(format, compute) else None
