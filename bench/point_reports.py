"""Results made of points, and those of bench.links, as Markdown: a table per scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import buckets, collectives, kernels, links, overlap, scale
from bench.machine import describe
from bench.points import Point
from bench.tables import links_table


@dataclass(frozen=True)
class Layout:
    """How a kind of result is shown.

    Attributes:
        scene: how many of a point's names say which table it belongs into.
        table: makes one of the points of a scene.
        caption: what the numbers are.
    """

    scene: int
    table: Callable[[list[Point], bool], str]
    caption: str


LAYOUTS = {
    kernels.KIND: Layout(
        1, kernels.table, "GB/s; in brackets the bandwidth of a plain copy that it amounts to."
    ),
    collectives.KIND: Layout(
        2,
        collectives.table,
        "Bandwidths at 4 bytes per element, whatever travels; bytes as the engine counts them.",
    ),
    overlap.KIND: Layout(
        3, overlap.table, "Exposed: median ± half the range between the quartiles of the rounds."
    ),
    buckets.KIND: Layout(
        3, buckets.table, "Median ± half the range between the quartiles of the rounds."
    ),
    scale.KIND: Layout(
        2, scale.table, "Median ± half the range between the quartiles of the rounds."
    ),
}


def point_report(result: dict[str, Any]) -> str:
    """A result made of points."""
    layout = LAYOUTS[result["kind"]]
    scenes: dict[tuple[str, ...], list[Point]] = {}
    for point in result["points"]:
        scenes.setdefault(tuple(point["of"][: layout.scene]), []).append(point)
    tables = [f"{_heading(result, s)}:\n\n{layout.table(p, True)}" for s, p in scenes.items()]
    return "\n\n".join([*tables, f"{layout.caption}\n{origin(result)}"])


def _heading(result: dict[str, Any], scene: tuple[str, ...]) -> str:
    if result["kind"] == overlap.KIND:
        return f"{', '.join(scene[:2])}, backward {scene[2]} x the wire's time for fp32"
    return ", ".join(scene)


def links_report(result: dict[str, Any]) -> str:
    """A result of bench.links."""
    tables = [f"{links.title(r)}:\n\n{links_table(r, True)}" for r in result["links"]]
    caption = (
        "Medians ± half the range between the quartiles of the rounds; ratios to "
        f"`{result['settings']['baseline']}` in the same round."
    )
    return "\n\n".join([*tables, f"{caption}\n{origin(result)}"])


def origin(result: dict[str, Any]) -> str:
    """Where a result comes from: machine, versions, commit and command."""
    return f"{describe(result['environment'])}.\nMeasured by `{result['command']}`."
