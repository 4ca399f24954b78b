"""Policy of a training that survives the death of ranks: how gradients then travel and are
averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastsync.config.switch import policy_of
from fastsync.wire.formats import Format, Wire, make_codec

__all__ = ["RESCALE", "ElasticPolicy", "may_lose_ranks"]

RESCALE = ("average", "sum_of_start")


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
        return policy_of(cls, wanted, "elastic")


def may_lose_ranks(wire: Wire) -> bool:
    """Return whether gradients may travel as `wire` between ranks of which some die and come back.

    What a rank keeps back dies with it. In a block format that is one rounding at most; top-k keeps
    back most of many gradients, and a user's codec whatever it likes. In the hierarchical form a
    death would leave unequal nodes.
    """
    codecs = map(make_codec, (wire.format, *wire.overrides.values()))
    return wire.form != "hierarchical" and all(isinstance(codec, Format) for codec in codecs)
