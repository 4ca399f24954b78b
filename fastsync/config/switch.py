"""Arguments of FastDDP that switch something on, or say more about it by a policy."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["policy_of"]

T = TypeVar("T")


def policy_of(kind: type[T], wanted: bool | T, argument: str) -> T | None:
    """Return `wanted` where it is a policy, the default one for True, None for False.

    Args:
        argument: its name, for the error.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(wanted, kind):
        return wanted
    if not isinstance(wanted, bool):
        name = kind.__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise TypeError(f"{argument} must be True, False or {article} {name}, but is {wanted!r}")
    return kind() if wanted else None
