"""The least time for which communication can be exposed, given when gradients are ready.

Messages i = 1..n are ready at r_i after the start of a backward of length T, in this order, and the
link needs c_i for each, one after the other. Message i starts when it is ready and its predecessor
is through, so the last one is through at

    F = max over i of (r_i + c_i + c_{i+1} + ... + c_n)

and max(0, F - T) of it is exposed, whatever is done. With single gradients as messages this is the
least for a model and a link: no choice of buckets can do better. With buckets as messages, ready
with their last gradients, it is the least for a plan. c_i is 2(N-1)/N times the bytes of the
message over the rate of the link; latency and the work of the processors are left aside.
"""

from __future__ import annotations

from collections.abc import Sequence


def finish(ready: Sequence[float], durations: Sequence[float]) -> float:
    """When the last of the messages is through: F above; 0 where there is none.

    Args:
        ready: when each message is ready, in the order in which they are sent.
        durations: what the link needs for each; both in seconds.
    """
    through = 0.0
    for at, duration in zip(ready, durations, strict=True):
        through = max(through, at) + duration
    return through


def least_exposed(ready: Sequence[float], durations: Sequence[float], backward: float) -> float:
    """The seconds by which the last message must outlast a backward of `backward` seconds."""
    return max(0.0, finish(ready, durations) - backward)


def bucketed(
    ready: Sequence[float], durations: Sequence[float], buckets: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Ready times and durations of buckets, each a list of message numbers."""
    return (
        [max(ready[i] for i in bucket) for bucket in buckets],
        [sum(durations[i] for i in bucket) for bucket in buckets],
    )
