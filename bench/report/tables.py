"""How every kind of result is shown, on terminals and in documents alike.

Most results are points: what was measured, its time, and what follows from it. A point is `{"of":
[names], "time": spread in seconds, ...}`; `of` names it among the others of its result, from the
outside in. Every table here takes points, or timings of variants, as they stand in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.common.text import Spread, milliseconds, ratio, render
from examples.common.variants import FLOOR, OURS

CEILING = "copy"  # of kernels: a plain copy of as many bytes
CODECS = ("encode", "reduce", "decode", "select")  # kernels of codecs, by the first word

Result = dict[str, Any]  # as it stands in the JSON
Point = dict[str, Any]
Timings = dict[str, dict[str, Any]]


def point(of: Sequence[str], seconds: Sequence[float], **more: Any) -> Point:
    """Return a point of the seconds of all rounds."""
    return {"of": list(of), "time": asdict(Spread.of(seconds)), **more}


def _plus_minus(found: Point) -> str:
    """Return the median in ms, and half the range between the quartiles."""
    return " ± ".join(milliseconds(Spread(**found["time"])))


def pivot(
    points: Sequence[Point],
    corner: str,
    cell: Callable[[Point], str],
    markdown: bool,
    row: Callable[[Point], str] = lambda p: p["of"][2],
    column: Callable[[Point], str] = lambda p: p["of"][3],
) -> str:
    """Return a table of points by two of their names."""
    found = {(row(p), column(p)): cell(p) for p in points}
    columns = list(dict.fromkeys(name for _, name in found))
    names = dict.fromkeys(name for name, _ in found)
    rows = [(name, *(found.get((name, c), "-") for c in columns)) for name in names]
    return render((corner, *columns), rows, markdown)


def link(timings: Timings, markdown: bool = False) -> str:
    """Return one row per variant on a link; see `bench links` for what the columns mean."""
    headers = (
        *("variant", "step ms", "±", "ratio", "sync ms", "±", "sync ratio"),
        *("MB sent", "of formula", "limit ms", "sync / limit", "weights"),
    )
    rows = []
    for name, of in timings.items():
        exposed, sent, synced = Spread(**of["exposed"]), of["sent_bytes"], name != FLOOR
        formula, limit = (synced and of[key] for key in ("formula_bytes", "limit_seconds"))
        times = (*milliseconds(Spread(**of["step"])), f"{of['ratio']['median']:.3f}")
        sync_ratio = f"{of['exposed_ratio']['median']:.3f}" if of["exposed_ratio"] else "-"
        against = (
            f"{sent / formula:.3f}" if formula else "-",
            f"{1e3 * limit:.2f}" if limit else "-",
            f"{exposed.median / limit:.3f}" if limit else "-",
        )
        synchronised = (*milliseconds(exposed), sync_ratio, f"{sent / 1e6:.2f}")
        rows.append((name, *times, *synchronised, *against, of["check"]))
    return render(headers, rows, markdown)


def link_title(record: dict[str, Any]) -> str:
    """Return a line that says what was measured on a link."""
    rate = record["rate_bytes_per_second"] * 8e-9
    per_node = record.get("per_node", 1)
    shared = f" ({per_node} behind each link)" if per_node > 1 else ""
    return (
        f"{record['link']}, {record['ranks']} ranks{shared}, {record['model']}: "
        f"{record['gradient_bytes'] / 1e6:.1f} MB of gradients; all-reduce {rate:.3f} Gbit/s"
    )


def kernels(points: list[Point], markdown: bool = False) -> str:
    """GB/s and the share of the ceiling: of transfers, then of codecs, whose cells hold both."""

    def cell(of: Point) -> str:
        host = f", {1e6 * of['host']['median']:.0f} us" if "host" in of else ""
        return f"{of['gbps']:.1f} ({1 / of['ratio']['median']:.2f}){host}"

    def word(of: Point, place: int) -> str:
        return str(of["of"][1].split()[place])

    corner, tables = "GB/s (of ceiling)", []
    plain = [p for p in points if word(p, 0) not in CODECS]
    coded = [p for p in points if word(p, 0) in CODECS and p["of"][2] != CEILING]
    if plain:
        names = (lambda p: p["of"][2]), (lambda p: p["of"][1])
        tables.append(pivot(plain, corner, cell, markdown, *names))
    if coded:
        names = (lambda p: f"{word(p, 1)}, {p['of'][2]}"), (lambda p: word(p, 0))
        tables.append(pivot(coded, corner, cell, markdown, *names))
    return "\n\n".join(tables)


def kernels_in_short(points: list[Point]) -> str:
    """Return one row per model: the shares of a copy's rate that FastDDP's kernels and the best of
    torch's ways reach, and the host's microseconds for ours.
    """
    found: dict[tuple[str, str], dict[str, Point]] = {}
    for p in points:
        model, case, method = p["of"]
        found.setdefault((model, case), {})[method] = p
    models, cases = (dict.fromkeys(names) for names in zip(*found, strict=True))

    def cell(ways: dict[str, Point]) -> str:
        share = {name: 1 / way["ratio"]["median"] for name, way in ways.items()}
        host = f", {1e6 * ways[OURS]['host']['median']:.0f} us" if "host" in ways[OURS] else ""
        torchs = max((share[name] for name in ways if name not in (CEILING, OURS)), default=None)
        return f"{share[OURS]:.2f}{f' / {torchs:.2f}' if torchs else ''}{host}"

    rows = [(m, *(cell(found[m, c]) if (m, c) in found else "-" for c in cases)) for m in models]
    return render(("ours / torch's best", *cases), rows, True)


def overlap(points: list[Point], markdown: bool = False) -> str:
    """Return one row per variant; times in ms."""

    def bound(of: Point, key: str) -> tuple[str, str]:
        if of[key] is None:
            return "-", "-"
        least = 1e3 * of[key]
        return f"{least:.1f}", f"{1e3 * of['time']['median'] / least:.2f}" if least else "-"

    headers = ("variant", "step ms", "exposed ms", "least", "ratio", "least of plan", "ratio")
    rows = []
    for p in points:
        times = (f"{1e3 * p['step']['median']:.1f}", _plus_minus(p))
        rows.append((p["of"][-1], *times, *bound(p, "least"), *bound(p, "least_of_plan")))
    return render(headers, rows, markdown)


def buckets(points: list[Point], markdown: bool = False) -> str:
    """Return the milliseconds of a step: a row per size, a column per family."""
    names = (lambda p: p["of"][4]), (lambda p: p["of"][3])
    return pivot(points, "step ms", _plus_minus, markdown, *names)


def scale(points: list[Point], markdown: bool = False) -> str:
    """Milliseconds: a row per quantity or variant, a column per number of parameters."""
    return pivot(points, "ms", _plus_minus, markdown)


def overhead(points: list[Point], markdown: bool = False) -> str:
    """Return one row per variant of one model, without columns in which nothing is."""
    base = next((p["over"] for p in points if "over" in p), FLOOR)
    headers = (
        *("variant", "step ms", f"of {base}", "backward, host ms"),
        *("kernels", "communication ms", "exposed ms", "hidden"),
    )
    rows = []
    for p in points:
        cells, busy, bare = ["-"] * 4, p["communication"], p["exposed"]
        if p["kernels"] is not None:
            hidden = f"{1 - bare / busy:.0%}" if busy else "-"
            cells = [str(p["kernels"]), f"{1e3 * busy:.2f}", f"{1e3 * bare:.2f}", hidden]
        of_floor, host = " ± ".join(ratio(Spread(**p["ratio"]))), 1e3 * p["host"]["median"]
        rows.append((p["of"][1], _plus_minus(p), of_floor, f"{host:.2f}", *cells))
    columns = zip(headers, *rows, strict=True)
    headers, *rows = zip(*(c for c in columns if set(c[1:]) - {"-", "0.00"}), strict=True)
    return render(headers, rows, markdown)


def graphs(points: list[Point], markdown: bool = False) -> str:
    """Return one row per variant of one model, without a graph and replayed."""
    rows = [(p["of"][1], _plus_minus(p), " ± ".join(ratio(Spread(**p["ratio"])))) for p in points]
    return render(("variant", "step ms", "of its step without a graph"), rows, markdown)


@dataclass(frozen=True)
class Layout:
    """How a kind of result that is made of points is shown.

    Attributes:
        scene: how many of a point's names say which table it belongs into.
        table: makes one of the points of a scene.
        caption: what the numbers are.
    """

    scene: int
    table: Callable[[list[Point], bool], str]
    caption: str = "Median ± half the range between the quartiles of the rounds."


_RATES = "GB/s; in brackets, of a plain copy's; on GPUs then microseconds of the host per call."
_EXPOSED = "Exposed: median ± half the range between the quartiles of the rounds."
LAYOUTS = {
    "kernels": Layout(1, kernels, _RATES),
    "overlap": Layout(4, overlap, _EXPOSED),
    "buckets": Layout(3, buckets),
    "overhead": Layout(1, overhead),
    "graphs": Layout(1, graphs),
    "scale": Layout(2, scale),
}
