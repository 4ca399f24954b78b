"""Offers that ranks exchange before they watch each other."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address

from fastsync._build.env import Env
from fastsync._torch import Store
from fastsync.faults.machines import own_address, process_space
from fastsync.reducer import core

__all__ = ["Offer", "make_offer", "why_not"]


@dataclass(frozen=True)
class Offer:
    """One rank's statement about itself.

    Attributes:
        address: host, port and key of its watch; None if it has none.
        process: its process number.
        machine: equal on ranks for which process numbers mean the same.
        refusal: why it has no watch; empty if it has.
    """

    address: tuple[str, int, int] | None
    process: int
    machine: str
    refusal: str = ""


def make_offer(store: Store, obstacle: str) -> tuple[core.FaultWatch | None, Offer]:
    """Return this rank's offer, and its watch, not yet connected to others, if it has one.

    Args:
        obstacle: why it will not wrap a model; empty if it will.
    """
    process, machine = os.getpid(), process_space()
    if obstacle:
        return None, Offer(None, process, machine, obstacle)
    env = Env.read()
    if not env.watch:
        return None, Offer(None, process, machine, "FASTSYNC_WATCH is 0")
    try:
        stacks = _Stacks.of_main_thread()
        patience = (env.stall_warn, env.lost_after)
        watch = core.make_watch(own_address(store), *patience, stacks.file, stacks.signal)
    except (OSError, RuntimeError) as error:
        return None, Offer(None, process, machine, str(error))
    return watch, Offer(watch.address(), process, machine)


def why_not(offers: Sequence[Offer]) -> str:
    """Return why ranks with these offers cannot watch each other; empty where they can."""
    for rank, offer in enumerate(offers):
        if offer.address is None:
            return f"on rank {rank}, {offer.refusal}"
        alone = ip_address(offer.address[0]).is_loopback
        if alone and any(other.machine != offer.machine for other in offers):
            return f"rank {rank} has only found an address of its own machine, {offer.address[0]}"
    return ""


@dataclass(frozen=True)
class _Stacks:
    """File and signal with which the main thread writes its Python stack, without the GIL.

    Attributes:
        file: -1 where there is no handler.
        signal: its number.
    """

    file: int = -1
    signal: int = 0

    @staticmethod
    def of_main_thread() -> _Stacks:
        if threading.current_thread() is not threading.main_thread():
            return _Stacks()
        return _registered()


@cache
def _registered() -> _Stacks:
    number = signal.SIGRTMAX - 7
    if signal.getsignal(number) is not signal.SIG_DFL:
        return _Stacks()
    file = os.memfd_create("fastsync stacks", os.MFD_CLOEXEC)
    faulthandler.register(number, file, all_threads=False)
    return _Stacks(file, number)
