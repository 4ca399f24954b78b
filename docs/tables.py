"""Writes tables that `python -m bench report` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure.benchmark import TABLE
from examples.common.machine import command_line, environment, write_json
from examples.common.ranks import Group
from examples.common.rounds import SCHEMA
from examples.common.text import Row

__all__ = ["write_table"]


def write_table(
    path: Path, title: str, headers: Sequence[str], rows: Iterable[Row], **about: Any
) -> None:
    """With the command that has measured, and the machine.

    Args:
        headers: one for each column.
        rows: as many texts each.
        about: what the ranks were, such as ``ranks`` and ``threads_per_rank``; in place of this
            process's.
    """
    facts = environment(Group(0, 1, torch.device("cpu"))) | about
    head = {"kind": TABLE, "schema": SCHEMA, "command": command_line(), "environment": facts}
    write_json({**head, "title": title, "headers": list(headers), "rows": list(rows)}, path)
