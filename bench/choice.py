"""--only and --skip of the commands that run several things."""

from __future__ import annotations

from collections.abc import Sequence

from bench.errors import UsageError


def choose(kind: str, known: Sequence[str], only: str, skip: str) -> list[str]:
    """The names of what to run, in the order of `only`, or of `known` where that is "all".

    Args:
        kind: what a name is the name of.
        only: "all", or names with commas between them.
        skip: names to leave out.

    Raises:
        UsageError: a name is unknown, or nothing is left.
    """
    wanted = list(known) if only == "all" else _names(only)
    unwanted = _names(skip)
    unknown = [name for name in [*wanted, *unwanted] if name not in known]
    if unknown:
        raise UsageError(f"unknown {kind} {unknown}; expects some of {', '.join(known)}")
    left = [name for name in wanted if name not in unwanted]
    if not left:
        raise UsageError("nothing is left to run")
    return left


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
