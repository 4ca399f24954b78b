"""Writes measured figures into the documents, between markers, from bench/results/*.json.

    python -m bench.step --json bench/results/step.json
    python -m bench.report

What stands between `<!-- bench:step -->` and `<!-- /bench:step -->` in README.md or docs/*.md is
replaced by a table made of bench/results/step.json, or by a remark where there is no such file;
`bench:links-wires` is the part of links.json that tells which wire format to choose, and
`bench:summary` one row of each of five results.
`bench:gpu-aims`, and `bench:gpu-` with the name of a stage of bench.gpu_all, stand for the results
of every GPU, each in a folder of bench/results. Charts are drawn into docs/bench-*.svg. With
--check nothing is written; the exit code is 1 where a document or a chart does not say what its
result says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench import links
from bench.figures import DRAWN, chart_text, drawn, table_charts
from bench.gpu_aims import aims_table
from bench.machine import describe
from bench.point_reports import LAYOUTS, links_report, point_report, wires_report
from bench.record import TABLE
from bench.summary import summary
from bench.tables import render

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(
    r"(?P<start><!-- bench:(?P<name>[\w-]+) -->\n).*?(?P<end><!-- /bench:(?P=name) -->)", re.DOTALL
)
GPU, AIMS = "gpu-", "aims"
SUMMARY = "summary"
NOT_MEASURED = "*not measured yet*"
# Markers that show a part of another result.
VIEWS = {"links-wires": links.KIND}


def documents(root: Path = ROOT) -> list[Path]:
    """The documents that may hold figures."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def step_report(result: dict[str, Any]) -> str:
    """A Markdown table of a result of bench.step: ratios to the baseline, a column per model."""
    baseline, models = result["settings"]["baseline"], result["models"]
    names = list(dict.fromkeys(v for model in models.values() for v in model["variants"]))
    rows = []
    for name in names:
        timings = (model["variants"].get(name) for model in models.values())
        rows.append((f"`{name}`", *(_cell(timing, name == baseline) for timing in timings)))
    table = render(("step time", *(_heading(*item) for item in models.items())), rows, True)
    every = [timing for model in models.values() for timing in model["variants"].values()]
    counts = [len(timing["rounds"]) for timing in every]
    rounds = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
    return (
        f"{table}\n\nRatio to `{baseline}` in the same round, median of {rounds} "
        f"rounds ± half the range between the quartiles; `{baseline}` itself in milliseconds.\n"
        f"{describe(result['environment'])}.\nMeasured by `{result['command']}`."
    )


def table_report(result: dict[str, Any]) -> str:
    """A result that is one table, in Markdown."""
    table = render(result["headers"], result["rows"], True)
    origin = f"{describe(result['environment'])}.\nMeasured by `{result['command']}`."
    return f"{table}\n\n{result['title'].capitalize()}.\n{origin}"


def _heading(name: str, model: dict[str, Any]) -> str:
    return f"{name}: {model['tensors']} tensors, {model['gradient_bytes'] / 1e6:.0f} MB"


def _cell(timing: dict[str, Any] | None, is_baseline: bool) -> str:
    if timing is None:
        return "-"
    spread, scale, unit = (
        (timing["step"], 1e3, " ms") if is_baseline else (timing["ratio"], 1.0, "")
    )
    digits = 1 if is_baseline else 2
    half = scale * (spread["q3"] - spread["q1"]) / 2
    return f"{scale * spread['median']:.{digits}f} ± {half:.{digits}f}{unit}"


def figures(name: str, results: Path = RESULTS, charts: bool = True) -> str:
    """What belongs between the markers of `name`; `charts`: with links to what is drawn."""
    if name.startswith(GPU):
        return _of_gpus(name.removeprefix(GPU), results)
    if name == SUMMARY:
        return summary(results) or NOT_MEASURED
    source = VIEWS.get(name, name)
    path = results / f"{source}.json"
    if not path.exists():
        return NOT_MEASURED
    result = json.loads(path.read_text(encoding="utf-8"))
    if name in VIEWS:
        return wires_report(result)
    if result.get("kind") == links.KIND:
        return links_report(result)
    if result.get("kind") in LAYOUTS:
        chart = f"![{chart_text(result)}](bench-{name}.svg)\n\n" if charts and name in DRAWN else ""
        return chart + point_report(result)
    if result.get("kind") == TABLE:
        shown = f"Chart: {result['title']}; its numbers are in the table below"
        files = table_charts(name, result) if charts else ()
        return "".join(f"![{shown}]({file})\n\n" for file in files) + table_report(result)
    return step_report(result)


def _of_gpus(stage: str, results: Path) -> str:
    """What every GPU's folder holds of a stage of bench.gpu_all, or of its aims."""
    if stage == AIMS:
        found = [aims_table(folder) for folder in sorted(results.glob("*/"))]
    else:
        paths = sorted(results.glob(f"*/{stage}.json"))
        found = [figures(path.stem, path.parent, charts=False) for path in paths]
    return "\n\n".join(text for text in found if text) or NOT_MEASURED


def filled(text: str, results: Path = RESULTS) -> str:
    """`text` with what stands between markers made anew."""
    return MARKED.sub(lambda m: f"{m['start']}{figures(m['name'], results)}\n{m['end']}", text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
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


def renewed() -> dict[Path, str]:
    """Every document and chart as the results would have it."""
    texts = {path: filled(path.read_text(encoding="utf-8")) for path in documents()}
    return texts | {ROOT / "docs" / name: svg for name, svg in drawn(RESULTS).items()}


if __name__ == "__main__":
    raise SystemExit(main())
