"""Sizes that were chosen for a plan, in place of those that follow from policy and network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fastsync.plan.policy import BucketPolicy, piece_bytes
from fastsync.plan.topology import Network
from fastsync.wire.formats import Format, Wire, make_codec

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Amounts that travel at a time, in bytes, and their form.

    Attributes:
        first: of gradients that close the first bucket; cap: bytes that close the others.
        last: that the last bucket should hold at most; None: as the others.
        piece: of a coded bucket's pieces; None: as wire and network say.
        form: of what travels coded; None: as the wire says.
    """

    first: int
    cap: int
    last: int | None = None
    piece: int | None = None
    form: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.first, self.cap, self.last, self.piece)
        if any(type(n) is not int or n <= 0 for n in numbers if n is not None):
            raise ValueError(f"sizes must be positive numbers of bytes, but are {numbers}")

    @classmethod
    def of(cls, buckets: BucketPolicy, wire: Wire, network: Network, device: torch.device) -> Sizes:
        """Return the sizes that plans have by default."""
        sized = buckets.on(network)
        codec = make_codec(wire.format)
        piece = None
        free = device.type == "cpu" and wire.piece_bytes is None  # otherwise it is fixed
        if isinstance(codec, Format) and not wire.plain and free:
            share = codec.coded_bytes(codec.block) / (4 * codec.block)
            piece = piece_bytes(wire, network.at_share(share), device)
        return cls(sized.caps[0], sized.caps[-1], sized.last, piece)

    def buckets(self) -> BucketPolicy:
        """Return the bucket policy of these sizes."""
        return BucketPolicy((self.first, self.cap), last=self.last)

    def wire(self, wire: Wire) -> Wire:
        """Return `wire` in these pieces and this form; a plain wire has neither."""
        if wire.plain:
            return wire
        return replace(
            wire, piece_bytes=self.piece or wire.piece_bytes, form=self.form or wire.form
        )
