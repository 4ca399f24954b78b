"""Sizes that plans follow: those of policy and network, or those that a trial has chosen."""

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
    """Tuner that tries other sizes. It must not keep the engine alive, which holds it."""

    def after_step(self) -> None:
        """Try sizes at the end of every step from the second plan on, on all ranks."""

    def interrupted(self, why: str) -> None:
        """End the trial: something came in between, and it will not be called again."""


class Sizing:
    """Choice of bucket sizes of one engine.

    Attributes:
        chosen: sizes that plans follow instead of policy and network; None: there are none.
        tuner: the tuner that is called after each step; None: there is none.
    """

    def __init__(self, reducer: core.Reducer, buckets: BucketPolicy, device: torch.device) -> None:
        self._core = reducer
        self._device = device
        self._buckets = buckets
        self.chosen: Sizes | None = None
        self.tuner: Tuner | None = None
        self._ticks = False  # the present plan has it called

    def default(self, wire: Wire, network: Network) -> Sizes:
        """Return the sizes that policy and network give."""
        return Sizes.of(self._buckets, wire, network, self._device)

    def rules(
        self, sizes: Sizes | None, wire: Wire, network: Network, fixed: bool
    ) -> tuple[BucketPolicy, Wire, Network]:
        """Return the bucket policy, wire and network that a plan is made by.

        Args:
            sizes: sizes to plan with; None: those that policy and network give.
            fixed: only the policy decides; network and sizes may change nothing.
        """
        if fixed or not self._buckets.adaptive:
            return self._buckets, wire, Network()
        if sizes is None:
            return self._buckets.on(network), wire, network
        return sizes.buckets(), sizes.wire(wire), network

    def forget(self, why: str) -> None:
        """Forget the chosen sizes and the trial: they do not fit any more."""
        self.keep(why)
        self.chosen = None

    def keep(self, why: str) -> None:
        """End the trial; the present plan stays."""
        if self.tuner is not None:
            self.tuner.interrupted(why)
            self.stop()

    def until(self, settled: bool) -> int:
        """Return after how many steps of the training the plan to be installed is done with.

        Args:
            settled: it is no first guess, and travels as the user chose.
        """
        self._ticks = self.tuner is not None and settled
        return self._core.steps() + 1 if self._ticks else -1

    def tick(self) -> bool:
        """End a step. Return False if the step was not reported for the tuner."""
        if not self._ticks or self.tuner is None:
            return False
        self.tuner.after_step()
        return True

    def stop(self) -> None:
        """Stop calling the tuner; what it has chosen stays."""
        self.tuner = None
        if self._ticks:
            self._ticks = False
            self._core.set_until(-1)
