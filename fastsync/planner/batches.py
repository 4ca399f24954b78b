"""The largest batch that fits, found with few traces.

[Note: batches between traces]
What a trace notes of a batch grows with it along a line, mark by mark, as long as the model does
the same things: so two traces tell what one of any other batch would note. Their peaks do not grow
along a line, since another moment of the step may become the largest. So the search replays records
on the line through two traces, which is quick, and traces the batch that it has found. If that
shows what was expected, the answer stands; else the search goes on with the new trace and the one
before it. A model that does other things with other batches is traced at every step of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastsync.planner.record import Record

__all__ = ["Traces", "largest_batch"]

_MOST = 1 << 20  # samples
_TRACES = 12  # that one search makes at most to see whether an answer is right
_ALIKE = 1e-9  # of a peak, that rounding may take or add
_BEYOND = 2  # times as far as traces lie on one line, it is taken to go on


@dataclass
class Traces:
    """Records of a model by samples, each traced once.

    Attributes:
        trace: makes one.
        sure: samples up to which three traces have been seen to lie on one line.
    """

    trace: Callable[[int], Record]
    made: dict[int, Record] = field(default_factory=dict)
    sure: int = 0

    def record(self, samples: int) -> Record:
        """Return the trace with so many samples."""
        if samples not in self.made:
            self.made[samples] = self.trace(samples)
        return self.made[samples]

    def expected(self, pair: tuple[int, int], samples: int) -> Record:
        """Return that record by the line through a pair of traces, or a trace if they differ."""
        if samples in self.made:
            return self.made[samples]
        one, other = (self.record(each) for each in pair)
        return _between(one, other, samples) or self.record(samples)


def _between(one: Record, other: Record, samples: int) -> Record | None:
    """Return the record of another batch on the line through two.

    None: they differ in more than sizes.
    """
    if len(one.marks) != len(other.marks) or one.params != other.params:
        return None
    part = (samples - one.samples) / (other.samples - one.samples)
    marks = []
    for a, b in zip(one.marks, other.marks, strict=True):
        if a.kind != b.kind or a.place != b.place:
            return None
        if a is not b and a != b:
            size, work = a.size + part * (b.size - a.size), a.work + part * (b.work - a.work)
            a = a._replace(size=max(size, 0.0), work=max(work, 0.0))
        marks.append(a)
    inputs = round(one.inputs + part * (other.inputs - one.inputs))
    return replace(one, samples=samples, inputs=inputs, marks=tuple(marks))


def largest_batch(peak: Callable[[Record], float], traces: Traces, limit: float, start: int) -> int:
    """Return the most samples with a peak of at most `limit` bytes; 0: one is too much.

    Where traces never lie on a line, the largest traced one that fits.

    Args:
        start: samples to begin with; it and twice as many are traced.
    """
    pair = (start, 2 * start)
    for _ in range(_TRACES):
        found = _searched(peak, traces, pair, limit)
        guess = max(found, 1)
        if guess in traces.made or guess <= traces.sure:
            return found
        expected = peak(traces.expected(pair, guess))
        if math.isclose(expected, peak(traces.record(guess)), rel_tol=_ALIKE):
            traces.sure = _BEYOND * guess
            return found
        pair = (pair[1], guess)
    return max((n for n, record in traces.made.items() if peak(record) <= limit), default=0)


def _searched(
    peak: Callable[[Record], float], traces: Traces, pair: tuple[int, int], limit: float
) -> int:
    """Return the most samples that fit, by the records that a pair of traces lets expect."""
    fits, fails, peaks, wanted = 0, 0, dict[int, float](), pair[0]
    while wanted:
        peaks[wanted] = peak(traces.expected(pair, wanted))
        if peaks[wanted] <= limit:
            fits = wanted
        else:
            fails = wanted
        wanted = _next(peaks, limit, fits, fails)
    return fits


def _next(peaks: dict[int, float], limit: float, fits: int, fails: int) -> int:
    """Return the batch to look at next; 0: the answer is known.

    Args:
        fits: most samples that are known to fit, or 0; `fails`: fewest that are known not to.
    """
    if not fails:
        return 0 if fits >= _MOST else min(_MOST, 8 * fits)
    if fails - fits == 1:
        return 0
    guess = (fits + fails) // 2
    if fits and len(peaks) % 2:  # every other time along the line through both
        part = (limit - peaks[fits]) / (peaks[fails] - peaks[fits])
        guess = fits + int(part * (fails - fits))
    return min(max(guess, fits + 1), fails - 1)
