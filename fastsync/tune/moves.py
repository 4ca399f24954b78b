"""From some sizes to others that are worth trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fastsync.plan.sizes import Sizes

__all__ = ["Bounds", "Move", "moves"]

Move = Callable[[Sizes], Sizes | None]


@dataclass(frozen=True)
class Bounds:
    """What sizes may be.

    Attributes:
        least: bytes, of anything.
        total: bytes of all gradients; more than that in one bucket changes nothing.
        forms: that what travels coded may take beside the default's, with no less accuracy.
    """

    least: int
    total: int
    forms: tuple[str, ...] = ()


def moves(bounds: Bounds) -> list[Move]:
    """The likeliest first. Each goes one step from where it is, and may be repeated."""

    def cap(sizes: Sizes, factor: float) -> Sizes | None:
        size = _scaled(min(sizes.cap, bounds.total), factor)
        last = None if sizes.last is None else min(sizes.last, size)
        return replace(sizes, cap=size, first=min(sizes.first, size), last=last)

    def last(sizes: Sizes, factor: float) -> Sizes | None:
        if sizes.last is None and factor > 1:
            return None  # it is as large as the others
        size = _scaled(sizes.last or min(sizes.cap, bounds.total), factor)
        return replace(sizes, last=size) if size < sizes.cap else None

    def first(sizes: Sizes, factor: float) -> Sizes | None:
        size = _scaled(min(sizes.first, bounds.total), factor)
        return replace(sizes, first=min(size, sizes.cap))

    def piece(sizes: Sizes, factor: float) -> Sizes | None:
        if sizes.piece is None:
            return None
        return replace(sizes, piece=_scaled(sizes.piece, factor))

    def scaled(change: Callable[[Sizes, float], Sizes | None], factor: float) -> Move:
        def move(sizes: Sizes) -> Sizes | None:
            found = change(sizes, factor)
            return found if found is not None and _least(found) >= bounds.least else None

        return move

    def formed(form: str) -> Move:
        return lambda sizes: None if sizes.form == form else replace(sizes, form=form)

    return [
        scaled(cap, 0.5),
        scaled(cap, 2),
        scaled(last, 0.5),
        scaled(last, 2),
        scaled(first, 4),
        scaled(first, 0.25),
        scaled(piece, 0.5),
        scaled(piece, 2),
        *map(formed, bounds.forms),
    ]


def _scaled(size: int, factor: float) -> int:
    return max(1, int(size * factor))


def _least(sizes: Sizes) -> int:
    numbers = (sizes.first, sizes.cap, sizes.last, sizes.piece)
    return min(number for number in numbers if number is not None)
