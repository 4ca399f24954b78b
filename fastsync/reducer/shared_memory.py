"""Memory that the ranks of one machine share: whether there is any, alike on all ranks.

Each rank offers memory of its own, or says why not. All ranks see all offers, map each other's
memory, and tell each other whether they could. So they come to the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import MPI, cpu_backend, gloo_threads, group_store, group_timeout
from fastsync.faults.machines import network_space
from fastsync.reducer import core
from fastsync.reducer.monitor import gather_watched

_log = logging.getLogger("fastsync")
_PLACE = "the sharing of memory"
# Addresses, not memory: pages come into being when buckets ask for them.
_ADDRESSES = 256 << 30
_BUFFERS = 6  # of each parameter, for what a script keeps, at least
_TIMEOUT = 1800.0  # seconds; torch's default


@dataclass(frozen=True)
class _Offer:
    """One rank's statement about its memory.

    Attributes:
        host: equal on ranks that see each other's processes and share a network.
        address: address at which other ranks find its memory; None if it shares none.
        refusal: why it shares none; empty if it does.
    """

    host: str
    address: core.MemoryAddress | None
    refusal: str = ""


def share_memory(group: dist.ProcessGroup, param_bytes: int) -> core.SharedMemory | None:
    """Memory through which the ranks of `group` average gradients on the CPU. Collective.

    Returns:
        None on all ranks where they are on several machines, neither Gloo nor MPI carries the
        group, any of them sets ``FASTSYNC_SHM=0``, or the system forbids it.
    """
    if group.size() == 1 or group_store(group) is None:
        return None
    memory, refusal = offer_memory(group, param_bytes)
    if group.rank() == 0:
        way = f"the process group: {refusal}" if refusal else "memory that the ranks share"
        _log.info("fastsync: gradients travel through %s", way)
    return memory


def offer_memory(
    group: dist.ProcessGroup, param_bytes: int
) -> tuple[core.SharedMemory | None, str]:
    """Return what `share_memory` returns, and why there is no memory, alike on all ranks.

    The reason is empty where there is memory.
    """
    memory, offer = _make_offer(group, param_bytes)
    offers = gather_watched(offer, group, _PLACE)
    refusal = _why_not(offers)
    if memory is not None and not refusal:
        failures = gather_watched(_connect(memory, offers, group), group, _PLACE)
        refusal = next(filter(None, failures), "")
    return (None if refusal else memory), refusal


def _make_offer(
    group: dist.ProcessGroup, param_bytes: int
) -> tuple[core.SharedMemory | None, _Offer]:
    if gloo_threads(group) < 0 and cpu_backend(group) != MPI:
        return None, _Offer("", None, "it is not a group of Gloo or MPI")
    try:
        if not Env.read().shared_memory:
            return None, _Offer("", None, "FASTSYNC_SHM is 0")
        host = network_space()
        size = max(_ADDRESSES // group.size(), _BUFFERS * param_bytes)
        memory = core.SharedMemory(size)
    except (OSError, RuntimeError, ValueError) as error:
        return None, _Offer("", None, str(error))
    return memory, _Offer(host, memory.address())


def _why_not(offers: Sequence[_Offer]) -> str:
    for rank, offer in enumerate(offers):
        if offer.refusal:
            return f"on rank {rank}, {offer.refusal}"
    if len({offer.host for offer in offers}) > 1:
        return "the ranks are on several machines"
    return ""


def _connect(memory: core.SharedMemory, offers: Sequence[_Offer], group: dist.ProcessGroup) -> str:
    """Connect with the memory of the others. Return why that failed; empty if it did not."""
    timeout = group_timeout(group)
    seconds = _TIMEOUT if timeout is None else timeout.total_seconds()
    addresses = [offer.address for offer in offers if offer.address is not None]
    try:
        memory.connect(addresses, group.rank(), seconds)
    except RuntimeError as error:
        return f"rank {group.rank()} cannot map the others' memory: {error}"
    return ""
