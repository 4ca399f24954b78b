"""The two lists in the repository: what torch's own class passes, and what is excepted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["read_baseline", "read_exceptions", "write_baseline"]

_BASELINE = Path(__file__).with_name("baseline.json")
_EXCEPTIONS = Path(__file__).with_name("exceptions.txt")


def read_baseline(backend: str) -> list[str]:
    """Names of the tests that torch's own class passes, for this torch or else the newest known.

    Empty where there is no list for this backend.
    """
    known = _read().get(backend)
    if not known:
        return []
    newest = max(known, key=lambda version: [int(part) for part in version.split(".")])
    return known.get(_version(), known[newest])


def write_baseline(backend: str, passed: Sequence[str]) -> None:
    """Replaces the list of this torch."""
    lists = _read()
    lists.setdefault(backend, {})[_version()] = sorted(passed)
    _BASELINE.write_text(json.dumps(lists, indent=1, sort_keys=True) + "\n")


def read_exceptions() -> dict[str, str]:
    """Tests that FastDDP need not pass, with the reason: lines of `name: reason`."""
    lines = _EXCEPTIONS.read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.strip() and not line.startswith("#"))
    return {name.strip(): reason.strip() for name, reason in pairs}


def _read() -> dict[str, dict[str, list[str]]]:
    if not _BASELINE.exists():
        return {}
    lists: dict[str, dict[str, list[str]]] = json.loads(_BASELINE.read_text())
    return lists


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
