"""Callbacks that keep nothing alive: neither an engine nor its model may live because of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast
from weakref import WeakMethod

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T], afterwards: Callable[P, T] | None = None) -> Callable[P, T]:
    """Return a function that calls a bound method as long as its object lives.

    Args:
        afterwards: what it calls then; None: nothing, and it returns None.
    """
    known = WeakMethod(method)

    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        call = known() or afterwards
        return cast(T, None if call is None else call(*args, **kwargs))

    return called
