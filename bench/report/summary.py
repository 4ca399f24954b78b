"""Make the README's table: five rows of the results that docs/benchmarks.md shows in full.

All five come from one machine, so that a reader may compare the rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.common.machine import describe
from examples.common.text import render
from examples.common.variants import FLOOR

SOURCES = ("step-real", "links", "memory", "ops", "parity")
VARIANTS = ("ddp", "fastsync", "fastsync_int8")
HEADERS = ("", "torch's DDP", "FastDDP", "FastDDP, int8")
LOCAL_MODEL, MODEL, LINK, LINK_NAME = "gpt2", "wide", "1gbit", "1 Gbit/s"
CAPTION = "Step times of FastDDP as parts of DDP's in the same round; memory per byte of gradients."
LOSSES = "[losses](docs/benchmarks.md#training)"


def summary(results: Path) -> str | None:
    """Return the table in Markdown; None where a result that it needs is missing."""
    paths = {name: results / f"{name}.json" for name in SOURCES}
    if not all(path.exists() for path in paths.values()):
        return None
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    local = found["step-real"]["models"][LOCAL_MODEL]
    link = next(r for r in found["links"]["links"] if (r["link"], r["model"]) == (LINK, MODEL))
    rows = [
        (f"step time, one machine, {_size(local)}", *_timings(local["variants"])),
        (f"step time, {LINK_NAME}, {_size(link)}", *_timings(link["variants"])),
        ("memory of gradients and buckets", *_column(found["memory"], MODEL)),
        ("operators dispatched to synchronise 400 parameters", *_dispatched(found["ops"])),
        _parity(found["parity"]),
    ]
    facts = (describe(result["environment"]) for result in found.values())
    machines = dict.fromkeys(fact.rpartition("; commit")[0] for fact in facts)
    return f"{render(HEADERS, rows, True)}\n\n{CAPTION}\n{'; '.join(machines)}."


def _size(model: dict[str, Any]) -> str:
    return f"{model['gradient_bytes'] / 1e6:.0f} MB of gradients"


def _timings(variants: dict[str, Any]) -> list[str]:
    """Return the baseline in milliseconds, and ratios to it in the same round."""
    baseline, *others = (variants[name] for name in VARIANTS)
    ratios = [f"{other['ratio']['median']:.2f}x" for other in others]
    return [f"{1e3 * baseline['step']['median']:.0f} ms", *ratios]


def _column(table: dict[str, Any], heading: str) -> list[str]:
    place = table["headers"].index(heading)
    cells = {row[0]: row[place] for row in table["rows"]}
    return [cells[name] for name in VARIANTS]


def _dispatched(table: dict[str, Any]) -> list[str]:
    """Return how many operators a step dispatches beyond those of the bare model."""
    cells = {row[0]: int(row[1]) for row in table["rows"]}
    return [str(cells[name] - cells[FLOOR]) for name in VARIANTS]


def _parity(table: dict[str, Any]) -> tuple[str, ...]:
    """Return the verdict of the columns on FastDDP, or all different ones."""
    title = f"{table['title'].partition(',')[0]}, {len(table['headers']) - 1} trainings"
    _, *verdicts = next(row for row in table["rows"] if row[0] == "fastsync")
    return title, "reference", ", ".join(dict.fromkeys(verdicts)), LOSSES
