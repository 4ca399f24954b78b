"""Writes measured figures into the documents, between markers, from bench/results/*.json.

    python -m bench step --json bench/results/step.json
    python -m bench report

What stands between `<!-- bench:step -->` and `<!-- /bench:step -->` in README.md or docs/*.md is
replaced by a table made of bench/results/step.json, or by a remark where there is no such file;
`bench:links-wires` is the part of links.json that tells which wire format to choose, likewise of
every other result on links, and `bench:summary` one row of each of five results; `bench:held` is
computed, of no result.
`bench:gpu-` with the name of a stage of `bench gpu_all` stands for results of every GPU, each in a
folder of bench/results. Charts are drawn into docs/bench-*.svg. With
--check nothing is written; the exit code is 1 where a document or a chart does not say what its
result says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report.figures import charts
from bench.report.formulas import held_table
from bench.report.summary import summary
from bench.report.tables import LAYOUTS, Point, Result, kernels_in_short, link, link_title
from examples.common.machine import describe
from examples.common.ranks import Parser, argument
from examples.common.text import render
from examples.common.variants import BASELINE

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(
    r"(?P<start><!-- bench:(?P<name>[\w-]+) -->\n).*?(?P<end><!-- /bench:(?P=name) -->)", re.DOTALL
)
GPU, SUMMARY, HELD = "gpu-", "summary", "held"
NOT_MEASURED = "*not measured yet*"
WIRES, LINKS = "-wires", "links"  # the end of a marker that shows a part of a result on links


def documents(root: Path = ROOT) -> list[Path]:
    """Return the documents that may hold figures."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def _step_report(result: Result) -> str:
    """Return the ratios to the baseline, a column per model."""
    models = result["models"]
    every = [model["variants"] for model in models.values()]
    headings = (
        f"{name}: {model['tensors']} tensors, {model['gradient_bytes'] / 1e6:.0f} MB"
        for name, model in models.items()
    )
    rows = [
        (f"`{name}`", *(_cell(variants.get(name), name == BASELINE) for variants in every))
        for name in dict.fromkeys(name for variants in every for name in variants)
    ]
    counts = [len(timing["rounds"]) for variants in every for timing in variants.values()]
    rounds = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
    caption = (
        f"Ratio to `{BASELINE}` in the same round, median of {rounds} "
        f"rounds ± half the range between the quartiles; `{BASELINE}` itself in milliseconds."
    )
    return f"{render(('step time', *headings), rows, True)}\n\n{caption}"


def _cell(timing: Result | None, is_baseline: bool) -> str:
    if timing is None:
        return "-"
    spread = timing["step" if is_baseline else "ratio"]
    scale, digits, unit = (1e3, 1, " ms") if is_baseline else (1.0, 2, "")
    half = scale * (spread["q3"] - spread["q1"]) / 2
    return f"{scale * spread['median']:.{digits}f} ± {half:.{digits}f}{unit}"


def _point_report(result: Result) -> str:
    """Return a table for each scene."""
    layout = LAYOUTS[result["kind"]]
    scenes: dict[tuple[str, ...], list[Point]] = {}
    for point in result["points"]:
        scenes.setdefault(tuple(point["of"][: layout.scene]), []).append(point)
    tables = []
    for scene, points in scenes.items():
        heading = ", ".join(scene[:3])
        if result["kind"] == "overlap":
            heading += f", backward {scene[3]} x the wire's time for fp32"
        tables.append(f"{heading}:\n\n{layout.table(points, True)}")
    return "\n\n".join([*tables, layout.caption])


def _links_report(result: Result) -> str:
    """Return a table for each link."""
    tables = (f"{link_title(r)}:\n\n{link(r['variants'], True)}" for r in result["links"])
    caption = (
        "Medians ± half the range between the quartiles of the rounds; ratios to "
        f"`{BASELINE}` in the same round."
    )
    return "\n\n".join([*tables, caption])


def _wires_report(result: Result) -> str:
    """Return how long a step takes with every wire format on every link, and what it sends.

    A row per format, next to torch's fp32 and fp16; a column per link.
    """
    records = result["links"]
    rows = []
    for name, first in records[0]["variants"].items():
        if name in ("ddp", "ddp_fp16") or name.startswith("fastsync"):
            ratios = (f"{r['variants'][name]['ratio']['median']:.2f}" for r in records)
            rows.append((f"`{name}`", f"{first['sent_bytes'] / 1e6:.1f}", *ratios))
    headings = (f"{r['link']}, {r['ranks']} ranks" for r in records)
    caption = (
        f"Medians of the ratio to `{BASELINE}` in the same round; bytes as the interface counts "
        f"them, of {records[0]['gradient_bytes'] / 1e6:.1f} MB of gradients."
    )
    table = render((f"step / `{BASELINE}`", "MB sent", *headings), rows, True)
    return f"{table}\n\n{caption}"


def _short_report(result: Result) -> str:
    caption = "Shares of a plain copy's rate; then microseconds that our call takes the host."
    return f"{kernels_in_short(result['points'])}\n\n{caption}"


def _table_report(result: Result) -> str:
    table, title = render(result["headers"], result["rows"], True), result["title"]
    return f"{table}\n\n{title[:1].upper()}{title[1:]}."


SHORT = {"kernels": _short_report}  # of results of GPUs


def figures(name: str, results: Path = RESULTS, drawn: bool = True) -> str:
    """Return the text between the markers of `name`; `drawn`: with links to its charts."""
    if name.startswith(GPU):
        return _of_gpus(name.removeprefix(GPU), results)
    if name == SUMMARY:
        return summary(results) or NOT_MEASURED
    if name == HELD:
        return held_table()
    path = results / f"{name.removesuffix(WIRES)}.json"
    if not path.exists():
        return NOT_MEASURED
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = result["kind"]
    reports = {"step": _step_report, LINKS: _links_report, "table": _table_report}
    report = _wires_report if name.endswith(WIRES) else reports.get(kind, _point_report)
    if not drawn:
        report = SHORT.get(name, report)
    shown = f"Chart of {kind}; its numbers are in the tables below"
    if kind == "table":
        shown = f"Chart: {result['title']}; its numbers are in the table below"
    files = charts(name, result) if drawn else ()
    links = "".join(f"![{shown}]({file})\n\n" for file in files)
    origin = f"{describe(result['environment'])}.\nMeasured by `{result['command']}`."
    return f"{links}{report(result)}\n{origin}"


def _of_gpus(stage: str, results: Path) -> str:
    """Return the figures of a stage of `bench gpu_all` from the folders of all GPUs."""
    paths = sorted(results.glob(f"*/{stage}.json"))
    found = [figures(path.stem, path.parent, drawn=False) for path in paths]
    return "\n\n".join(found) or NOT_MEASURED


def filled(text: str, results: Path = RESULTS) -> str:
    """`text` with what stands between markers made anew."""
    return MARKED.sub(lambda m: f"{m['start']}{figures(m['name'], results)}\n{m['end']}", text)


def renewed() -> dict[Path, str]:
    """Return every document and chart as the results would have it."""
    texts = {path: filled(path.read_text(encoding="utf-8")) for path in documents()}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        texts |= {ROOT / "docs" / name: svg for name, svg in charts(path.stem, result).items()}
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    check = argument("--check", "only compare", action="store_true")
    return Parser("bench report", __doc__, check).run(lambda args: _renew(args.check), argv)


def _renew(check: bool) -> int:
    stale = 0
    for path, wanted in renewed().items():
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        if check:
            print(f"{path.name} does not say what bench/results say", file=sys.stderr)
            stale += 1
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"{path.name} updated")
    return 1 if stale else 0
