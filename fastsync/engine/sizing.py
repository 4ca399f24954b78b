"""Which sizes plans follow: policy and network as a rule, or what somebody has chosen by trying."""

from __future__ import annotations

from typing import Protocol

import torch

from fastsync.engine import core
from fastsync.plan.policy import BucketPolicy
from fastsync.plan.sizes import Sizes
from fastsync.plan.topology import Network
from fastsync.wire.formats import Wire

__all__ = ["Sizing", "Tuner"]


class Tuner(Protocol):
    """Tries other sizes. Must not keep the engine alive, which holds it."""

    def after_step(self) -> None:
        """At the end of every step from the second plan on, on all ranks."""

    def interrupted(self, why: str) -> None:
        """Something came in between: it will not be called again."""


class Sizing:
    """Of one engine.

    Attributes:
        chosen: what plans follow instead of policy and network; None: nothing.
        tuner: who is called after each step; None: nobody.
    """

    def __init__(self, reducer: core.Reducer, buckets: BucketPolicy, device: torch.device) -> None:
        self._core = reducer
        self._device = device
        self._buckets = buckets
        self.chosen: Sizes | None = None
        self.tuner: Tuner | None = None
        self._ticks = False  # the present plan has it called

    def default(self, wire: Wire, network: Network) -> Sizes:
        """What policy and network give."""
        return Sizes.of(self._buckets, wire, network, self._device)

    def rules(
        self, sizes: Sizes | None, wire: Wire, network: Network, fixed: bool
    ) -> tuple[BucketPolicy, Wire, Network]:
        """What a plan is made by.

        Args:
            sizes: those to plan with; None: what policy and network give.
            fixed: nothing may change any more what the policy alone says.
        """
        if fixed or not self._buckets.adaptive:
            return self._buckets, wire, Network()
        if sizes is None:
            return self._buckets.on(network), wire, network
        return sizes.buckets(), sizes.wire(wire), network

    def forget(self, why: str) -> None:
        """What has been chosen does not fit any more, nor what is being tried."""
        self.keep(why)
        self.chosen = None

    def keep(self, why: str) -> None:
        """No more is tried; the present plan stays."""
        if self.tuner is not None:
            self.tuner.interrupted(why)
            self.stop()

    def until(self, settled: bool) -> int:
        """After how many steps of the training the plan that is about to be installed is done with.

        Args:
            settled: it is no first guess, and travels as the user chose.
        """
        self._ticks = self.tuner is not None and settled
        return self._core.steps() + 1 if self._ticks else -1

    def tick(self) -> bool:
        """A step has ended. False: it was not for the tuner's sake that this is told."""
        if not self._ticks or self.tuner is None:
            return False
        self.tuner.after_step()
        return True

    def stop(self) -> None:
        """The tuner is not called again; what it has chosen stays."""
        self.tuner = None
        if self._ticks:
            self._ticks = False
            self._core.set_until(-1)
