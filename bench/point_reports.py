"""Results made of points, and those of bench.links, as Markdown: a table per scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import buckets, collectives, kernels, links, overhead, overlap, scale, trace
from bench.machine import describe
from bench.points import Point
from bench.tables import links_table, render

TORCH_WIRES = ("ddp", "ddp_fp16")


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
        4, overlap.table, "Exposed: median ± half the range between the quartiles of the rounds."
    ),
    buckets.KIND: Layout(
        3, buckets.table, "Median ± half the range between the quartiles of the rounds."
    ),
    overhead.KIND: Layout(
        1, overhead.table, "Medians ± half the range between the quartiles of the rounds."
    ),
    trace.KIND: Layout(1, trace.table, "Of one rank, per step, from a profile of several."),
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
        return f"{', '.join(scene[:3])}, backward {scene[3]} x the wire's time for fp32"
    return ", ".join(scene)


def links_report(result: dict[str, Any]) -> str:
    """A result of bench.links."""
    tables = [f"{links.title(r)}:\n\n{links_table(r, True)}" for r in result["links"]]
    caption = (
        "Medians ± half the range between the quartiles of the rounds; ratios to "
        f"`{result['settings']['baseline']}` in the same round."
    )
    return "\n\n".join([*tables, f"{caption}\n{origin(result)}"])


def wires_report(result: dict[str, Any]) -> str:
    """Of a result of bench.links, how long a step takes with every wire format, and what it sends.

    A row per format, next to torch's fp32 and fp16; a column per link.
    """
    baseline, records = result["settings"]["baseline"], result["links"]
    shown = [n for n in records[0]["variants"] if n in TORCH_WIRES or n.startswith("fastsync")]
    rows = []
    for name in shown:
        timings = [record["variants"][name] for record in records]
        ratios = (f"{timing['ratio']['median']:.2f}" for timing in timings)
        rows.append((f"`{name}`", f"{timings[0]['sent_bytes'] / 1e6:.1f}", *ratios))
    headings = (f"{r['link']}, {r['ranks']} ranks" for r in records)
    table = render((f"step / `{baseline}`", "MB sent", *headings), rows, True)
    caption = (
        f"Medians of the ratio to `{baseline}` in the same round; bytes as the interface counts "
        f"them, of {records[0]['gradient_bytes'] / 1e6:.1f} MB of gradients."
    )
    return f"{table}\n\n{caption}\n{origin(result)}"


def origin(result: dict[str, Any]) -> str:
    """Where a result comes from: machine, versions, commit and command."""
    return f"{describe(result['environment'])}.\nMeasured by `{result['command']}`."
