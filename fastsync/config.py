"""Policies: what the user asked for, checked and frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastsync.codec import Wire

__all__ = ["BucketPolicy", "SyncPolicy"]

_MIB = 1 << 20
_FIRST_BUCKET_BYTES = _MIB
_DEFAULT_CAP_MB = 25


@dataclass(frozen=True)
class BucketPolicy:
    """How large buckets may grow, in bytes of gradients.

    Attributes:
        caps: cap of the first bucket, the second, and so on; the last one holds for the rest. A
            bucket is closed by the gradient that reaches its cap.
    """

    caps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.caps or min(self.caps) <= 0:
            raise ValueError(f"bucket caps must be positive, but got {self.caps} bytes")

    @classmethod
    def from_mb(cls, cap_mb: float | None, caps_mb: Sequence[float] | None = None) -> BucketPolicy:
        """From DDP's arguments `bucket_cap_mb` and `bucket_cap_mb_list`, in MiB.

        By default the first bucket is small, so that communication starts early, and the others
        hold 25 MiB.

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
        return cls((_FIRST_BUCKET_BYTES, _DEFAULT_CAP_MB * _MIB))


@dataclass(frozen=True)
class SyncPolicy:
    """How gradients travel and where they live.

    Attributes:
        wire: the format of gradients on the wire.
        views: gradients live in the flat buffers where wire and gradient dtype are equal.
        fail_on_unused: a parameter without gradient is an error instead of being handled.
        static_graph: the graph and the set of used parameters never change.
        skip_unused: buckets without any gradient are not sent, which must be the same on all ranks.
        warn_unused: name parameters without gradient in one warning.
        hooked: a communication hook reduces the buffers, so they hold gradients and nothing else.
    """

    wire: Wire = field(default_factory=Wire)
    views: bool = True
    fail_on_unused: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    warn_unused: bool = True
    hooked: bool = False
