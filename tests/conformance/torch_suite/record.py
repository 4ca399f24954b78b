"""The two lists that a suite keeps: what torch's own code passes, and what is excepted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["LISTS", "Lists"]


@dataclass(frozen=True)
class Lists:
    """baseline.json and exceptions.txt in the folder of a suite."""

    folder: Path

    def baseline(self, backend: str) -> list[str]:
        """Tests that torch's own code passes, for this torch or else the newest known.

        Empty where there is no list for this backend.
        """
        known = self._read().get(backend)
        if not known:
            return []
        newest = max(known, key=lambda version: [int(part) for part in version.split(".")])
        return known.get(_version(), known[newest])

    def write_baseline(self, backend: str, passed: Sequence[str]) -> None:
        """Replace the list of this torch."""
        lists = self._read()
        lists.setdefault(backend, {})[_version()] = sorted(passed)
        self._baseline.write_text(json.dumps(lists, indent=1, sort_keys=True) + "\n")

    def exceptions(self) -> dict[str, str]:
        """Tests that need not pass here, with the reason: lines of `name: reason`."""
        lines = (self.folder / "exceptions.txt").read_text().splitlines()
        pairs = (line.split(": ", 1) for line in lines if line.strip() and line[0] != "#")
        return {name.strip(): reason.strip() for name, reason in pairs}

    @property
    def _baseline(self) -> Path:
        return self.folder / "baseline.json"

    def _read(self) -> dict[str, dict[str, list[str]]]:
        if not self._baseline.exists():
            return {}
        lists: dict[str, dict[str, list[str]]] = json.loads(self._baseline.read_text())
        return lists


LISTS = Lists(Path(__file__).parent)


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
