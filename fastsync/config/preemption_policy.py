"""Policy of a training whose machines are taken away: it saves, and ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PreemptionPolicy"]

# Signals that no handler may have, and signals of errors of the program itself.
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGINT", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


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
