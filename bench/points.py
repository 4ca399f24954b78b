"""Results that are points: what was measured, its time, and what follows from it.

A point is `{"of": [names], "time": spread in seconds, ...}`; `of` names it among the others of its
result, from the outside in. Every kind of result that bench.compare can compare is made of points.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.jobs import Part
from bench.machine import command_line
from bench.record import write_json
from bench.stats import Spread
from bench.tables import Row, render

SCHEMA = 1

Point = dict[str, Any]


def point(of: Sequence[str], seconds: Sequence[float], **more: Any) -> Point:
    """A point of the seconds of all rounds."""
    return {"of": list(of), "time": asdict(Spread.of(seconds)), **more}


def document(kind: str, settings: dict[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """A result of one or several jobs, each of which reported its environment and points."""
    ranks = [part["environment"]["ranks"] for part in parts]
    several = " and ".join(map(str, dict.fromkeys(ranks)))
    return {
        "kind": kind,
        "schema": SCHEMA,
        "command": command_line(),
        "environment": parts[0]["environment"] | {"ranks": several if len(parts) > 1 else ranks[0]},
        "settings": settings,
        "points": [point for part in parts for point in part["points"]],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what all commands that measure points take."""
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads (default: 1)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", type=Path, help="write the result to this file")


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """A command's parser, described by its module."""
    return argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def saved(kind: str, args: argparse.Namespace) -> Callable[[list[Part]], None]:
    """What `run_jobs` calls to keep the result."""

    def finish(parts: list[Part]) -> None:
        if args.json:
            settings = {k: v for k, v in vars(args).items() if k not in ("json", "markdown")}
            write_json(document(kind, settings, parts), args.json)

    return finish


def pivot(
    points: Sequence[Point],
    corner: str,
    places: tuple[int, int],
    cell: Callable[[Point], str],
    markdown: bool = False,
) -> str:
    """A table with rows and columns by the names at two places of `of`."""
    row, column = places
    columns = list(dict.fromkeys(p["of"][column] for p in points))
    names = list(dict.fromkeys(p["of"][row] for p in points))
    found = {(p["of"][row], p["of"][column]): cell(p) for p in points}
    rows = [(name, *(found.get((name, c), "-") for c in columns)) for name in names]
    return render((corner, *columns), rows, markdown)


def rows_of(
    points: Sequence[Point],
    headers: Row,
    row: Callable[[Point], Row],
    markdown: bool = False,
) -> str:
    """A table with a row per point."""
    return render(headers, [row(point) for point in points], markdown)


def milliseconds(found: Point) -> str:
    """The median in ms, and half the range between the quartiles."""
    spread = Spread(**found["time"])
    return f"{1e3 * spread.median:.2f} ± {1e3 * spread.width / 2:.2f}"
