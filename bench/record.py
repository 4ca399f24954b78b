"""Results that are one table: written as JSON, read back by bench.report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.launch import Group
from bench.machine import command_line, environment
from bench.tables import Row, render

TABLE = "table"


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", type=Path, help="write the result to this file")


def publish(
    title: str, headers: Row, rows: Sequence[Row], group: Group, args: argparse.Namespace
) -> None:
    """Prints a table on the main rank, and writes it where --json says."""
    if not group.is_main:
        return
    print(title)
    print(render(headers, rows, args.markdown))
    if args.json:
        result = {
            "kind": TABLE,
            "command": command_line(),
            "environment": environment(group),
            "title": title,
            "headers": list(headers),
            "rows": [list(row) for row in rows],
        }
        write_json(result, args.json)


def write_json(result: dict[str, Any], path: Path) -> None:
    """Writes a result, and the folder it belongs into where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
