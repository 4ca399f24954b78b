"""Findings of checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
