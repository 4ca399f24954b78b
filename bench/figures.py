"""The figures of docs/benchmarks.md, drawn from results: one per kind, for its first scene."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.charts import Labels, Line, bar_chart, line_chart
from bench.collectives import readable
from bench.wrappers import FLOOR

Result = dict[str, Any]


def _in_first_scene(result: Result, depth: int) -> list[dict[str, Any]]:
    """The points that share the first `depth` names of the first one."""
    points = result["points"]
    return [p for p in points if p["of"][:depth] == points[0]["of"][:depth]]


def collectives(result: Result) -> str:
    """Bus bandwidth by size, a line per way to average."""
    points = _in_first_scene(result, 2)
    lines = [
        Line(name, [(p["size"], p["bus_gbps"]) for p in points if p["of"][2] == name])
        for name in dict.fromkeys(p["of"][2] for p in points)
    ]
    title = f"Averaging gradients: {', '.join(points[0]['of'][:2])}"
    labels = Labels(title, "fp32 gradients", "bus bandwidth, GB/s of fp32", readable)
    return line_chart(labels, lines)


def buckets(result: Result) -> str:
    """Step time by size of buckets; what each family does by default is a dashed line."""
    points = _in_first_scene(result, 3)
    caps = [p["cap_mib"] for p in points if p.get("cap_mib")]
    lines = []
    for family in dict.fromkeys(p["of"][3] for p in points if p["of"][3] != FLOOR):
        mine = [p for p in points if p["of"][3] == family]
        sized = [(p["cap_mib"], 1e3 * p["time"]["median"]) for p in mine if p["cap_mib"]]
        lines.append(Line(family, sized))
        for p in mine:
            if p["cap_mib"] is None:
                level = 1e3 * p["time"]["median"]
                ends = [(min(caps), level), (max(caps), level)]
                lines.append(Line(f"{family}, default", ends, dashed=True))
    title = f"Size of buckets: {points[0]['of'][2]}, {', '.join(points[0]['of'][:2])}"
    return line_chart(Labels(title, "bucket_cap_mb, MiB", "step, ms"), lines)


def overlap(result: Result) -> str:
    """Exposed time as bars, the least that model and link allow as ticks across them."""
    points = [p for p in _in_first_scene(result, 3) if p["of"][-1] != FLOOR]
    exposed: dict[str, dict[str, float]] = {}
    least: dict[str, dict[str, float]] = {}
    for p in points:
        group = f"{p['of'][3]} x the wire's time"
        exposed.setdefault(group, {})[p["of"][-1]] = 1e3 * p["time"]["median"]
        if p["least"] is not None:
            least.setdefault(group, {})[p["of"][-1]] = 1e3 * p["least"]
    title = f"Exposed communication, and the least (black): {', '.join(points[0]['of'][:3])}"
    return bar_chart(Labels(title, "length of backward", "exposed, ms"), exposed, least)


def table_charts(name: str, result: Result) -> dict[str, str]:
    """SVG texts by file name, of a result that is a table and has the points of lines besides."""
    lines = result.get("lines", {})
    if name == "accuracy":
        drawn_lines = [
            Line(way, [(x, y) for x, y in points], dashed="native" in way)
            for way, points in lines.items()
        ]
        labels = Labels("Error of averages", "ranks", "error against fp64, relative")
        return {"bench-accuracy.svg": line_chart(labels, drawn_lines, log_y=True)}
    if name == "curves":
        return {f"bench-curves-{task}.svg": loss_chart(task, lines[task]) for task in lines}
    return {}


def loss_chart(task: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    """Training loss by step, a line per wire format; the reference is dashed."""
    drawn_lines = [
        Line(wire, [(x, y) for x, y in points], dashed=wire == "fp32")
        for wire, points in curves.items()
    ]
    labels = Labels(f"Training in every wire format: {task}", "step", "training loss")
    return line_chart(labels, drawn_lines)


def chart_text(result: Result) -> str:
    """What the chart of a result shows, for those who do not see it."""
    return f"Chart of {result['kind']}; its numbers are in the tables below"


DRAWN: dict[str, Callable[[Result], str]] = {
    "collectives": collectives,
    "buckets": buckets,
    "overlap": overlap,
}


def drawn(results: Path) -> dict[str, str]:
    """SVG texts by file name, for those results that exist."""
    found = {}
    for name, draw in DRAWN.items():
        path = results / f"{name}.json"
        if path.exists():
            found[f"bench-{name}.svg"] = draw(json.loads(path.read_text(encoding="utf-8")))
    for name in ("accuracy", "curves"):
        path = results / f"{name}.json"
        if path.exists():
            found |= table_charts(name, json.loads(path.read_text(encoding="utf-8")))
    return found
