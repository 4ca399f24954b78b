"""Make the tables of docs/planner.md: python -m docs.make_planner

Formulas and plans come from the planner, measured peaks from docs/planner_peaks.py. With --check
nothing is written; the exit code is 1 if the page differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from docs.planner_peaks import MEASURED, STAGES, case_of, planned
from fastsync.planner.formulas import adam_by_formula, transformer_of
from fastsync.planner.hardware import Cluster, device_named, links_of
from fastsync.planner.plan import advise
from fastsync.planner.quantities import gigabytes, shown_seconds
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario

PAGE = Path(__file__).resolve().parent / "planner.md"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *(["---:"] * (len(headers) - 1))]
    lines = [headers, aligned, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scenario(numel: int, world: int) -> Scenario:
    """A transformer in bf16 with fp32 masters, 2 x 4,096 tokens a GPU, on nodes of 8 H100."""

    def trace(samples: int, checkpointing: bool) -> Record:
        return transformer_of(numel, torch.bfloat16, (samples, 4096), checkpointing)

    device = device_named("h100")
    cluster = Cluster(world, 8, *links_of(device, "nccl", None))
    return Scenario(trace, 2, adam_by_formula, device, cluster, masters=True, jitter=0.02)


def which() -> str:
    """What the planner advises, by size of the model and number of GPUs."""
    body = []
    for billions, world in itertools.product((1, 7, 70), (8, 64, 512)):
        asked = scenario(billions * 10**9, world)
        best, _ = advise([asked.candidate(s) for s in asked.strategies(world)], asked)
        cells = ["nothing fits", "-", "-", "-"]
        if best:
            time = best.time
            cells = [best.strategy.name, gigabytes(best.memory.total), shown_seconds(time.mean)]
            cells.append(f"{time.efficiency:.0%}")
        body.append((f"{billions} B", str(world), *cells))
    headers = ("parameters", "GPUs", "fastest that fits", "memory", "step", "efficiency")
    return markdown(headers, body)


def peaks() -> str:
    """Errors of planned peaks of steps with AdamW, over the models."""
    found = json.loads(MEASURED.read_text())
    errors = dict[str, dict[int, list[float]]]()
    for row in found["peaks"]:
        case = case_of(row)
        error = planned(case).total / row["bytes"] - 1
        errors.setdefault(case.way or "fp32", {}).setdefault(case.stage, []).append(error)
    body = []
    for way, stages in errors.items():
        pairs = ((min(stages[s]), max(stages[s])) if s in stages else None for s in STAGES)
        cells = (f"{100 * p[0]:+.1f} to {100 * p[1]:+.1f} %" if p else "-" for p in pairs)
        body.append((way, *cells))
    table = markdown(("planned over measured", *(f"zero={stage}" for stage in STAGES)), body)
    sizes = [abs(e) for stages in errors.values() for each in stages.values() for e in each]
    within = sum(size <= 0.02 for size in sizes)
    shown = (
        f"Median error {100 * median(sizes):.1f} %, worst {100 * max(sizes):.1f} %; {within} of "
        f"{len(sizes)} are within 2 %."
    )
    return f"{table}\n\n{shown} {found['machine']}, buckets of 25 MiB in stages 0 to 2."


TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in (which, peaks)}


def main() -> int:
    """Fill the page's tables; returns the exit code."""
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
    if args.check:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
