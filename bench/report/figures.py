"""The figures of the documents, drawn from results: of those made of points, the first scene."""

from __future__ import annotations

from bench.report.charts import Labels, Line, line_chart
from bench.report.tables import Point, Result
from examples.common.variants import FLOOR


def _in_first_scene(result: Result, depth: int) -> list[Point]:
    """Return the points that share the first `depth` names of the first one."""
    points = result["points"]
    return [p for p in points if p["of"][:depth] == points[0]["of"][:depth]]


def _buckets(result: Result) -> str:
    """Step time by size of buckets; what each family does by default is a dashed line."""
    points = _in_first_scene(result, 3)
    caps = [p["cap_mib"] for p in points if p.get("cap_mib")]
    lines = []
    for family in dict.fromkeys(p["of"][3] for p in points if p["of"][3] != FLOOR):
        levels = {p["cap_mib"]: 1e3 * p["time"]["median"] for p in points if p["of"][3] == family}
        default = levels.pop(None, None)
        lines.append(Line(family, list(levels.items())))
        if default is not None:
            ends = [(min(caps), default), (max(caps), default)]
            lines.append(Line(f"{family}, default", ends, dashed=True))
    title = f"Size of buckets: {points[0]['of'][2]}, {', '.join(points[0]['of'][:2])}"
    return line_chart(Labels(title, "bucket_cap_mb, MiB", "step, ms"), lines)


def _overlap(result: Result) -> str:
    """Exposed time by length of backward; the least that model and link allow is dashed."""
    points = [p for p in _in_first_scene(result, 3) if p["of"][-1] != FLOOR]
    lines = []
    for name in dict.fromkeys(p["of"][-1] for p in points):
        mine = [(float(p["of"][3]), p) for p in points if p["of"][-1] == name]
        lines.append(Line(name, [(x, max(0.0, 1e3 * p["time"]["median"])) for x, p in mine]))
        least = [(x, 1e3 * p["least"]) for x, p in mine if p["least"] is not None]
        if least and all(least != line.points for line in lines):
            lines.append(Line(f"{name}, least", least, dashed=True))
    title = f"Exposed communication: {', '.join(points[0]['of'][:3])}"
    labels = Labels(title, "backward, of the wire's time for fp32", "exposed, ms")
    return line_chart(labels, lines)


def _accuracy(result: Result) -> str:
    """Error by world size; a backend's own sum is dashed."""
    lines = [Line(way, points, "native" in way) for way, points in result["lines"].items()]
    labels = Labels("Error of averages", "ranks", "error against fp64, relative")
    return line_chart(labels, lines, log_y=True)


def _curve(title: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    """Training loss by step, a line per wire format or mode; the reference is dashed."""
    lines = [Line(way, points, way in ("fp32", "every step")) for way, points in curves.items()]
    return line_chart(Labels(title, "step", "training loss"), lines)


TRAININGS = {"curves": "Training in every wire format", "modes": "Training in every mode"}
DRAWN = {"accuracy": _accuracy, "buckets": _buckets, "overlap": _overlap}


def charts(name: str, result: Result) -> dict[str, str]:
    """Return SVG texts of a result by file name; none where nothing of its name is drawn."""
    if name in TRAININGS:
        tasks = result.get("lines", {}).items()
        titles = {task: f"{TRAININGS[name]}: {task}" for task, _ in tasks}
        return {f"bench-{name}-{task}.svg": _curve(titles[task], curves) for task, curves in tasks}
    return {f"bench-{name}.svg": DRAWN[name](result)} if name in DRAWN else {}
