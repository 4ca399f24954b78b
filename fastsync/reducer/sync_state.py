"""The state that a checkpoint of synchronisation, or a rank that joins, goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastsync.config.topology import Network

__all__ = ["Progress"]


@dataclass(frozen=True)
class Progress:
    """Progress of a training, as far as its buckets and schedules depend on it.

    Attributes:
        steps: synchronised steps so far.
        order: names of parameters, perhaps others than are trained now, in the order of the
            buckets.
        network: as this rank measured it, for bytes of gradients.
    """

    steps: int
    order: Sequence[str]
    network: Network
