"""Policy of comparing what all ranks should have alike."""

from __future__ import annotations

from dataclasses import dataclass

from fastsync.config.switch import policy_of

__all__ = ["ReplicaPolicy"]


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
        return policy_of(cls, wanted, "replicas")
