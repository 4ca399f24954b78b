"""Makes the tables of docs/planner.md: python -m docs.make_planner

Formulas and plans come from the planner; measurements that others have published, from
docs/measured/, whose sources stand there, beside those that docs/measure_planner.py has made. With
--check nothing is written; the exit code is 1 where the page differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.models import WORKLOADS
from docs import planner_peaks, planner_published, planner_scaling, planner_steps
from docs.planner_tables import markdown, scenario, signed, summary
from fastsync.planner.advice import advise
from fastsync.planner.arithmetic import held_rows
from fastsync.planner.compute import from_record
from fastsync.planner.devices import Device, device_named
from fastsync.planner.held import held_by
from fastsync.planner.links import Cluster, Link
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario
from fastsync.planner.strategy import named
from fastsync.planner.synthetic import adam_by_formula
from fastsync.planner.tracing import trace_model

HERE = Path(__file__).resolve().parent
ROOT, PAGE, SCATTER = HERE.parent, HERE / "planner.md", HERE / "planner-steps.svg"
SCATTER_TEXT = "Chart of planned over measured steps; their errors are in the table below"


# ---- formulas and plans ----------------------------------------------------------------------


def held() -> str:
    """70 billion parameters in bf16 on 8 GPUs."""
    rows = held_rows(70 * 10**9, held_by(2, 8.0, False), 8, 8, ("0", "1", "2", "3"))
    items = list(rows[0].items)[:3]
    body = [
        (
            row.strategy.name,
            *(gigabytes(row.items[name]) for name in items),
            gigabytes(row.total),
            gigabytes(row.sent),
        )
        for row in rows
    ]
    return markdown(("70 B, 8 GPUs", *items, "total", "sent per step"), body)


def which() -> str:
    """What the planner advises, by size of the model and number of GPUs."""
    body = []
    for billions, world in itertools.product((1, 7, 70), (8, 64, 512)):
        asked = scenario(billions * 10**9, world, (2, 4096))
        advice = advise(asked.candidates(world, with_batches=False), asked.device)
        cells = ["nothing fits", "-", "-", "-"]
        if best := advice.best:
            time = best.time
            cells = [best.strategy.name, gigabytes(best.memory.total), shown_seconds(time.mean)]
            cells.append(f"{time.efficiency:.0%}")
        second = advice.second.strategy.name if advice.second else "-"
        body.append((f"{billions} B", str(world), *cells, second))
    headers = ("parameters", "GPUs", "fastest that fits", "memory", "step", "efficiency", "second")
    return markdown(headers, body)


def scaling() -> str:
    """Efficiency of 7 billion parameters by number of GPUs and strategy."""
    worlds = (2, 8, 16, 64, 128, 1024, 8192)
    asked = scenario(7 * 10**9, 8, (2, 4096))
    body = []
    for kind in ("0", "1", "3", "hsdp"):
        times = [asked.time(named(kind, world, 8)) for world in worlds]
        name = "HSDP" if kind == "hsdp" else f"zero={kind}"
        body.append((name, *(f"{time.efficiency:.0%}" for time in times)))
    return markdown(("7 B, efficiency on", *(f"{world} GPUs" for world in worlds)), body)


# ---- what this project has measured ----------------------------------------------------------


NOT_MEASURED = "*not measured yet*"


def here() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "measured" / "here.json").read_text())
    return found


def peaks() -> str:
    """Peaks of steps with AdamW, in bytes per byte of parameters."""
    path = HERE / "measured" / "peaks.json"
    if not path.exists():
        return NOT_MEASURED
    found = json.loads(path.read_text())
    errors, cells = [], dict[tuple[str, str], list[str]]()
    for row in found["peaks"]:
        real, case = row["bytes"], planner_peaks.case_of(row)
        nbytes = planner_peaks.traced(case.model, case.checkpointing, case.masters).nbytes
        plan = planner_peaks.planned(case).total
        errors.append(plan / real - 1)
        shown = f"{plan / nbytes:.2f} / {real / nbytes:.2f} ({100 * errors[-1]:+.1f} %)"
        cells.setdefault((case.model, case.way), []).append(shown)
    stages = [f"zero={stage}" for stage in planner_peaks.STAGES]
    body = [
        (", ".join(filter(None, names)), *row, *["-"] * (len(stages) - len(row)))
        for names, row in cells.items()
    ]
    table = markdown(("predicted / measured, per byte of parameters", *stages), body)
    middle = f"{100 * median(map(abs, errors)):.1f} %"
    within = sum(abs(error) <= 0.02 for error in errors)
    worst = f"{100 * max(map(abs, errors)):.1f} %"
    shown = f"Median error {middle}, worst {worst}; {within} of {len(errors)} are within 2 %."
    return f"{table}\n\n{shown} {found['machine']}, buckets of 25 MiB in stages 0 to 2."


def matrix() -> str:
    """Steps on shaped links, of models that nothing was fitted to, and their picture."""
    rows = planner_steps.rows()
    if not rows:
        return NOT_MEASURED
    table = markdown(("median error, worst", "ranks", *planner_steps.WAYS, "all"), rows)
    return f"![{SCATTER_TEXT}]({SCATTER.name})\n\n{table}\n\n{planner_steps.origin()}"


def advised() -> str:
    """What plans call fastest, and what that costs."""
    rows = planner_steps.advised()
    return markdown(("link", "ranks", *planner_steps.JUDGE), rows) if rows else NOT_MEASURED


def steps() -> str:
    """Steps without an optimizer; the computation is the one measured without synchronisation."""
    found = here()
    body, errors = [], []
    for name, step in found["steps"].items():
        alone, real, plan = step["alone"], step["synchronised"], step["predicted"][1]
        errors.append(plan / real - 1)
        body.append((name, f"{alone / real:.2f}", f"{plan / real:.2f}", signed(errors[-1])))
    middle, worst, _ = summary(errors)
    headers = ("over the measured step", "without synchronisation", "predicted", "error")
    shown = f"Median error {middle}, worst {worst}. {found['machine']}."
    return f"{markdown(headers, body)}\n\n{shown}"


# Of bench links, all on the model called wide; the first link fits two constants.
LINKS = ("links", "links-slow", "links-four")
FITTED_ON = "veth"
WIRES = {"fp32": "fastsync", "bf16": "fastsync_bf16", "int8": "fastsync_int8"}


@dataclass(frozen=True)
class Shaped:
    """A link of bench links, with steps in seconds: without synchronisation, and by wire."""

    name: str
    ranks: int
    rate: float
    record: Record
    alone: float
    steps: dict[str, float]


def shaped_links() -> list[Shaped]:
    found = []
    for name in LINKS:
        result = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        for scene in result["links"]:
            workload = WORKLOADS[scene["model"]](scene["scale"])
            shape = tuple(workload.batch(0, 0).shape)
            record = trace_model(workload.build, shape)
            medians = {v: found["step"]["median"] for v, found in scene["variants"].items()}
            steps = {wire: medians[variant] for wire, variant in WIRES.items()}
            rate = scene["rate_bytes_per_second"]
            alone = medians["no_sync"]
            found.append(Shaped(scene["link"], scene["ranks"], rate, record, alone, steps))
    return found


def shaped_step(link: Shaped, wire: str, device: Device) -> float:
    """Predicted seconds: computation as measured without synchronisation."""
    at = Link(link.rate, 50e-6, "net")
    asked = Scenario(
        trace=lambda samples, checkpointing: link.record,
        samples=link.record.samples,
        optimizer=adam_by_formula,
        device=device,
        cluster=Cluster(link.ranks, link.ranks, at, at, "gloo"),
    )
    traced = from_record(link.record, device, 0.0)
    measured = traced.scaled(link.alone / (traced.forward + traced.backward))
    strategy = replace(named("0", link.ranks, link.ranks), wire=wire)
    return replace(asked, measured=measured).time(strategy).mean


def shaped() -> str:
    """Steps on shaped links, which bench links has measured."""
    links = shaped_links()
    grid = itertools.product(planner_steps.SENDING, (5e9, 1e10, 1.5e10, 2e10, 3e10))
    cpu = replace(device_named("cpu"), efficiency=1.0, streaming=1.0)
    devices = [replace(cpu, sending=lost, bandwidth=rate) for lost, rate in grid]

    def errors(link: Shaped, device: Device) -> list[float]:
        return [shaped_step(link, w, device) / step - 1 for w, step in link.steps.items()]

    first = next(link for link in links if link.name == FITTED_ON)
    best = min(devices, key=lambda device: max(map(abs, errors(first, device))))
    body, judged = [], []
    for link in links:
        found = errors(link, best)
        pairs = zip(link.steps.values(), found, strict=True)
        cells = [
            f"{1e3 * step * (1 + e):.0f} / {1e3 * step:.0f} ms ({signed(e)})" for step, e in pairs
        ]
        name = f"{link.name} (fitted here)" if link is first else link.name
        body.append((name, str(link.ranks), *cells))
        judged += [] if link is first else found
    middle, worst, bias = summary(judged)
    fitted = (
        f"Predicted / measured. Of the links that nothing was fitted to: median error {middle}, "
        f"worst {worst}, bias {bias}. Fitted: {best.sending * 1e9:.2g} s of computing "
        f"lost per GB sent beside it, {best.bandwidth / 1e9:g} GB/s for each pass of coding."
    )
    return f"{markdown(('link', 'ranks', *WIRES), body)}\n\n{fitted}"


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        *(held, which, scaling),
        *(planner_published.all_reduce, planner_published.iterations, planner_published.published),
        *(planner_scaling.horovod, planner_scaling.ddp, planner_published.sets),
        *(shaped, peaks, steps, matrix, advised),
    )
}


def main() -> int:
    """Fills the page's tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    made = text
    for name, table in TABLES.items():
        mark = re.compile(rf"(<!-- planner:{name} -->\n).*?(<!-- /planner:{name} -->)", re.S)
        if not mark.search(made):
            print(f"{PAGE.name} has no place for {name}", file=sys.stderr)
            return 1
        shown = table()
        made = mark.sub(lambda found, shown=shown: f"{found[1]}{shown}\n{found[2]}", made)
    picture = planner_steps.scatter()
    if args.check:
        drawn = SCATTER.read_text(encoding="utf-8") if SCATTER.exists() else None
        return int(made != text or drawn != picture)
    PAGE.write_text(made, encoding="utf-8")
    if picture is not None:
        SCATTER.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
