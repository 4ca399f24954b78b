"""Policies of a training whose ranks differ, die, or are taken away: what `Faults` holds."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastsync.wire.formats import Format, Wire, make_codec

T = TypeVar("T")
RESCALE = ("average", "sum_of_start")
# Signals that no handler may have, and signals of errors of the program itself.
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGINT", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


def _policy_of(kind: type[T], wanted: bool | T, argument: str) -> T | None:
    """Return `wanted` where it is a policy, the default one for True, None for False.

    Args:
        argument: its name, for the error.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(wanted, kind):
        return wanted
    if not isinstance(wanted, bool):
        name = kind.__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise TypeError(f"{argument} must be True, False or {article} {name}, but is {wanted!r}")
    return kind() if wanted else None


@dataclass(frozen=True)
class ReplicaPolicy:
    """Interval at which ranks compare what all of them should have, and response to a difference.

    Attributes:
        every: synchronised backwards from one comparison to the next.
        repair: ranks that differ copy what most ranks have. False, or where there is no majority:
            an error, on every rank.

    Raises:
        TypeError, ValueError: `every` is no positive number.
    """

    every: int = 10
    repair: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool):
            raise TypeError(f"replicas: every must be a number, but is {self.every!r}")
        if self.every < 1:
            raise ValueError(f"replicas: every must be at least 1, but is {self.every}")

    @classmethod
    def of(cls, wanted: bool | ReplicaPolicy) -> ReplicaPolicy | None:
        """Return the policy for FastDDP's argument: True, a policy, or False.

        Raises:
            TypeError: it is something else.
        """
        return _policy_of(cls, wanted, "replicas")


@dataclass(frozen=True)
class ElasticPolicy:
    """Policy of a training that goes on when ranks die.

    Attributes:
        min_ranks: with fewer ranks left it ends with an error, on each of them.
        rescale: what sums of gradients are divided by after a death. "average": the number of ranks
            that are left. "sum_of_start": the number at the start, so that each sample keeps the
            weight that it had.
        patience: with `sync`, seconds that ranks wait for the others before they average without
            them, as long as `min_ranks` are there. A rank that comes later takes over what the
            others have, before its next forward. None: they wait.

    Raises:
        TypeError, ValueError: one of them makes no sense.
    """

    min_ranks: int = 1
    rescale: str = "average"
    patience: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.min_ranks, int) or isinstance(self.min_ranks, bool):
            raise TypeError(f"elastic: min_ranks must be a number, but is {self.min_ranks!r}")
        if self.min_ranks < 1:
            raise ValueError(f"elastic: min_ranks must be at least 1, but is {self.min_ranks}")
        if self.rescale not in RESCALE:
            raise ValueError(
                f"elastic: rescale must be one of {', '.join(RESCALE)}, but is {self.rescale!r}"
            )
        if not isinstance(self.patience, int | float | None):
            raise TypeError(f"elastic: patience must be seconds, but is {self.patience!r}")
        if self.patience is not None and not 0 < self.patience < math.inf:
            raise ValueError(
                f"elastic: patience must be a positive number of seconds, but is {self.patience!r}"
            )

    @classmethod
    def of(cls, wanted: bool | ElasticPolicy) -> ElasticPolicy | None:
        """Return the policy for FastDDP's argument: True, a policy, or False.

        Raises:
            TypeError: it is something else.
        """
        return _policy_of(cls, wanted, "elastic")


def may_lose_ranks(wire: Wire) -> bool:
    """Return whether gradients may travel as `wire` between ranks of which some die and come back.

    What a rank keeps back dies with it. In a block format that is one rounding at most; top-k keeps
    back most of many gradients, and a user's codec whatever it likes. In the hierarchical form a
    death would leave unequal nodes.
    """
    codecs = map(make_codec, (wire.format, *wire.overrides.values()))
    return wire.form != "hierarchical" and all(isinstance(codec, Format) for codec in codecs)


@dataclass(frozen=True)
class PreemptionPolicy:
    """Policy of a training whose machines are taken away.

    Attributes:
        save: called on every rank after the same step, without arguments.
        signals: names of the signals that say so, to any rank.

    Raises:
        TypeError, ValueError: an argument makes no sense.
    """

    save: Callable[[], object]
    signals: tuple[str, ...] = ("SIGTERM",)

    def __post_init__(self) -> None:
        if not callable(self.save):
            raise TypeError(
                "on_preemption must be a function without arguments, or a PreemptionPolicy, but is "
                f"{self.save!r}"
            )
        names = self.signals
        if isinstance(names, str) or not all(isinstance(name, str) for name in names) or not names:
            raise TypeError(f"on_preemption: signals must be a tuple of names, but is {names!r}")
        for name in names:
            if name in _UNFIT or not isinstance(getattr(signal, name, None), signal.Signals):
                raise ValueError(f"on_preemption cannot wait for {name}: use SIGTERM, SIGUSR1, ...")

    @classmethod
    def of(cls, wanted: Callable[[], object] | PreemptionPolicy | None) -> PreemptionPolicy | None:
        """Return the policy for FastDDP's argument.

        Raises:
            TypeError: it is something else.
        """
        if wanted is None or isinstance(wanted, PreemptionPolicy):
            return wanted
        return cls(wanted)

    @property
    def numbers(self) -> tuple[signal.Signals, ...]:
        """Return the signals."""
        return tuple(signal.Signals[name] for name in self.signals)
