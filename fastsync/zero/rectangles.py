"""Consecutive elements of an array as rectangles, which is how checkpoint formats name parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["rectangles"]

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[Rectangle]:
    """Elements [begin, end) of a contiguous array, cut into as few as its first dimensions allow.

    At most 2n - 1 for n dimensions: the rest of a row, whole rows, the beginning of a row, and and
    the same within the two rows that are not whole.

    Yields:
        offsets and sizes, in the order of the elements; none of them is empty.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from _within(shape, last, begin, end)
        return
    yield from _within(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within(shape, last, last * row, end)


def _within(shape: Sequence[int], index: int, begin: int, end: int) -> Iterator[Rectangle]:
    """Yield the rectangles of one row, `index` in the first dimension."""
    start = index * math.prod(shape[1:])
    for offsets, sizes in rectangles(shape[1:], begin - start, end - start):
        yield (index, *offsets), (1, *sizes)
