"""What a check has found, and how ranks are listed in it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Finding", "Level", "fail", "name_ranks", "ok", "warn", "worst"]


class Level(enum.IntEnum):
    """How bad it is. FAIL: the ranks will not train, or not together."""

    OK = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class Finding:
    """One line of the verdict.

    Attributes:
        topic: what was checked, in a word or two.
        text: what was found.
        remedy: what to do about it; empty where nothing has to be done.
    """

    level: Level
    topic: str
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(Level.OK, topic, text)


def warn(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARN, topic, text, remedy)


def fail(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, topic, text, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """The highest level; OK where there are none."""
    return max((finding.level for finding in findings), default=Level.OK)


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", or "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    parts = ", ".join(_span(run) for run in _runs(ordered))
    return f"rank {parts}" if len(ordered) == 1 else f"ranks {parts}"


def _runs(ordered: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _span(run: Sequence[int]) -> str:
    if len(run) > 2:
        return f"{run[0]}-{run[-1]}"
    return ", ".join(map(str, run))
