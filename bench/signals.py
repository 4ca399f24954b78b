"""Signals, handled otherwise for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    """Has `handler` called for these signals; in the main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
