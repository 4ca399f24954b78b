"""Medians with the spread between quartiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(samples: Sequence[float], share: float) -> float:
    """The quantile of unsorted samples, by linear interpolation."""
    if not samples:
        raise ValueError("expects at least one sample")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a measurement, in the unit of its samples."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(quantile(samples, 0.5), quantile(samples, 0.25), quantile(samples, 0.75))

    @property
    def width(self) -> float:
        """The inter-quartile range."""
        return self.q3 - self.q1

    def margin(self, samples: int) -> float:
        """Half the 95 % interval of the median of so many independent samples.

        (McGill, Tukey and Larsen, "Variations of box plots", 1978.)
        """
        return 1.57 * self.width / math.sqrt(samples)
