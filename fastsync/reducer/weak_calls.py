"""Callbacks that keep nothing alive: neither an engine nor its model may live because of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast
from weakref import WeakMethod

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a bound method as long as its object lives.

    Afterwards it does nothing, and returns None.
    """
    known = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = known()
        return cast(T, None if alive is None else alive(*args, **kwargs))

    return call
