"""An optimizer's state that stays what it was while a training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

__all__ = ["whole_state"]


@contextmanager
def whole_state(optimizer: Optimizer) -> Iterator[None]:
    """Make each `optimizer.state_dict()` within return what it was when this was entered.

    Every rank enters it, and holds the whole state until it leaves.

    Args:
        optimizer: of parameters of a `FastDDP(zero=1)` or 2; nothing changes for any other.
    """
    state = optimizer.state_dict()
    optimizer.state_dict = lambda: state  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.state_dict
