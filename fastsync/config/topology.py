"""Measurements of the network in the first step, and how much travels at a time because of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Shortest time that something should travel.

    Attributes:
        seconds: of a transfer that takes much longer than the work beside it that is not hidden.
        latencies: of a transfer that takes much longer than one latency.
    """

    seconds: float
    latencies: int


@dataclass(frozen=True)
class Network:
    """A network between ranks, as fast as they have seen it.

    Attributes:
        rate: bytes per second; 0: unknown.
        latency: seconds that a collective takes that carries next to nothing; 0 where that is
            unknown, or of no interest.
    """

    rate: float = 0.0
    latency: float = 0.0

    @property
    def known(self) -> bool:
        """Return whether sizes may follow from it."""
        return self.rate > 0

    def at_share(self, share: float) -> Network:
        """Return the same for bytes that each stand for 1 / `share` of those counted so far."""
        return Network(self.rate * share, self.latency)

    def carries(self, span: Span, least: int, most: int) -> int:
        """Return the bytes that travel in `span`, but between `least` and `most`."""
        seconds = max(span.seconds, span.latencies * self.latency)
        return min(max(int(self.rate * seconds), least), most)
