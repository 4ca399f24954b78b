"""Whether a training outlives its ranks, and how gradients are then averaged."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RESCALE", "ElasticPolicy"]

RESCALE = ("average", "sum_of_start")


@dataclass(frozen=True)
class ElasticPolicy:
    """How a training goes on when ranks die.

    Attributes:
        min_ranks: with fewer ranks left it ends with an error, on each of them.
        rescale: what sums of gradients are divided by after a death. "average": the number of ranks
            that are left. "sum_of_start": the number at the start, so that each sample keeps the
            weight that it had.

    Raises:
        TypeError, ValueError: one of them makes no sense.
    """

    min_ranks: int = 1
    rescale: str = "average"

    def __post_init__(self) -> None:
        if not isinstance(self.min_ranks, int) or isinstance(self.min_ranks, bool):
            raise TypeError(f"elastic: min_ranks must be a number, but is {self.min_ranks!r}")
        if self.min_ranks < 1:
            raise ValueError(f"elastic: min_ranks must be at least 1, but is {self.min_ranks}")
        if self.rescale not in RESCALE:
            raise ValueError(
                f"elastic: rescale must be one of {', '.join(RESCALE)}, but is {self.rescale!r}"
            )

    @classmethod
    def of(cls, wanted: bool | ElasticPolicy) -> ElasticPolicy | None:
        """From FastDDP's argument: True, a policy, or False.

        Raises:
            TypeError: it is something else.
        """
        if isinstance(wanted, ElasticPolicy):
            return wanted
        if not isinstance(wanted, bool):
            raise TypeError(f"elastic must be True, False or an ElasticPolicy, but is {wanted!r}")
        return cls() if wanted else None
