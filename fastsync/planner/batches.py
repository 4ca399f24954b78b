"""The largest batch that fits, found with few traces.

[Note: batches between traces]
What a trace notes of a batch grows with it along a line, mark by mark, as long as the model does
the same things: so two traces tell what one of any other batch would note. Their peaks do not grow
along a line, since another moment of the step may become the largest. So the search replays records
between the traced ones, which is quick, and traces the batch that it has found. If that shows
what was expected, three traces lie on one line and the answer stands; else the search goes on with
the new trace beside the others. A model that does other things with other batches is traced at
every step of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastsync.planner.record import Record

__all__ = ["Traces", "largest_batch"]

_MOST = 1 << 20  # samples
_TRACES = 12  # that one search makes at most
_ALIKE = 1e-9  # of a figure, that rounding may take or add
_BEYOND = 2  # times as far as traces lie on one line, it is taken to go on


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


def _alike(one: Record, other: Record) -> bool:
    """Return whether both note the same, but for rounding."""
    return len(one.marks) == len(other.marks) and all(
        a.kind == b.kind and math.isclose(a.size, b.size, rel_tol=_ALIKE, abs_tol=1.0)
        for a, b in zip(one.marks, other.marks, strict=True)
    )


@dataclass
class Traces:
    """Records of a model by samples, each traced once.

    Attributes:
        trace: makes one.
        line: samples between which three traces lie on one line; None: not seen yet.
    """

    trace: Callable[[int], Record]
    made: dict[int, Record] = field(default_factory=dict)
    line: tuple[int, int] | None = None

    def record(self, samples: int) -> Record:
        """Return the trace with so many samples."""
        if samples not in self.made:
            self.made[samples] = self.trace(samples)
        return self.made[samples]

    def expected(self, samples: int) -> Record | None:
        """Return that record, if need be from the two nearest ones; None: they do not tell."""
        if samples in self.made:
            return self.made[samples]
        pair = self._nearest(samples)
        return _between(self.made[pair[0]], self.made[pair[1]], samples) if pair else None

    def is_sure(self, samples: int) -> bool:
        """Return whether it has been traced, or three traces say what a trace would note."""
        if samples in self.made or self.line is None:
            return samples in self.made
        return self.line[0] <= samples * _BEYOND and samples <= self.line[1] * _BEYOND

    def check(self, samples: int) -> None:
        """Trace a batch, and compare it with what was expected."""
        pair, expected = self._nearest(samples), self.expected(samples)
        found = self.record(samples)
        if pair and expected is not None and _alike(expected, found):
            ends = (*pair, samples, *(self.line or ()))
            self.line = min(ends), max(ends)
        else:
            self.line = None

    def _nearest(self, samples: int) -> list[int] | None:
        """Return the two traced ones around a number, or next to it."""
        below = sorted(n for n in self.made if n < samples)
        above = sorted(n for n in self.made if n > samples)
        if below and above:
            return [below[-1], above[0]]
        two = below[-2:] if below else above[:2]
        return two if len(two) == 2 else None


def largest_batch(peak: Callable[[Record], float], traces: Traces, limit: float, start: int) -> int:
    """Return the most samples with a peak of at most `limit` bytes; 0: one is too much.

    Where traces never lie on a line and run out, the largest traced one that fits.

    Args:
        start: samples to begin with; it and twice as many are traced.
    """
    for samples in (start, 2 * start):
        traces.record(samples)
    width = 0
    for _ in range(_TRACES):
        found, unsure = _searched(peak, traces, limit, start)
        if unsure is None:
            return found
        low, high = _traced(peak, traces, limit)
        # Where memory bends, guesses come near from one side, in ever smaller steps.
        creeps, width = 0 < width < 2 * (high - low), high - low
        traces.check(max(low + 1, math.isqrt(low * high)) if creeps else unsure)
    return _traced(peak, traces, limit)[0]


def _traced(peak: Callable[[Record], float], traces: Traces, limit: float) -> tuple[int, int]:
    """Return the most samples whose trace fits, and the fewest more whose trace does not."""
    peaks = {samples: peak(record) for samples, record in traces.made.items()}
    low = max((n for n, size in peaks.items() if size <= limit), default=0)
    return low, min((n for n, size in peaks.items() if n > low and size > limit), default=0)


def _searched(
    peak: Callable[[Record], float], traces: Traces, limit: float, start: int
) -> tuple[int, int | None]:
    """Return what a search by expected records finds, and the batch to trace to be sure of it."""
    fits, fails, peaks, wanted, halve = 0, 0, {}, start, False
    while wanted:
        record = traces.expected(wanted)
        if record is None:
            return 0, wanted
        before, peaks[wanted] = fails - fits, peak(record)
        if peaks[wanted] <= limit:
            fits = wanted
        else:
            fails = wanted
        halve = 0 < before < 2 * (fails - fits)
        wanted = _next(peaks, limit, fits, fails, halve)
    return fits, next((n for n in (fits, fails) if n and not traces.is_sure(n)), None)


def _next(peaks: dict[int, float], limit: float, fits: int, fails: int, halve: bool) -> int:
    """Return the batch to look at next; 0: the answer is known.

    Args:
        fits: most samples that are known to fit, or 0; `fails`: fewest that are known not to.
        halve: the line through two batches came hardly nearer.
    """
    known = sorted(peaks)
    pair = known[-2:] if not fails else [fits, fails] if fits else known[:2]
    guess = None
    if len(pair) == 2 and peaks[pair[1]] > peaks[pair[0]]:
        slope = (pair[1] - pair[0]) / (peaks[pair[1]] - peaks[pair[0]])
        guess = int(pair[0] + (limit - peaks[pair[0]]) * slope)
    if not fails:
        ahead = 2 * fits if guess is None else max(fits + 1, guess)
        return 0 if fits >= _MOST else min(_MOST, 8 * fits, ahead)
    if fails - fits == 1:
        return 0
    if guess is None or halve:
        guess = (fits + fails) // 2
    return min(max(guess, fits + 1), fails - 1)
