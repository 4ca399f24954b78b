"""Bandwidth of pack, unpack and codecs, beside torch's operations, against this machine's copies.

    python -m bench.kernels --models gpt2,resnet50 --json out/kernels.json

A kernel gathers the gradients of a model into one flat buffer (pack) or scatters a buffer (unpack);
on the way it multiplies by 1/N and casts. A codec's kernels gather gradients into a coded buffer
(encode), sum two coded buffers and code the sum (reduce), and scatter what a coded buffer stands
for (decode); top-k's finds the largest elements (select). Every way to do that is checked, against
the same thing done in fp64 or the format's bound, then timed, all of them in turn. GB/s counts each
element once read and once written, in the format that it has there, however often a method touches
it; the ceiling is a plain copy of as many bytes between two buffers of this machine's memory, and
`of ceiling` is the share of its bandwidth in the same round. On a GPU the times are those of events
on its stream.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import cli
from bench.codec_cases import CODEC_CASES, CodecCase
from bench.errors import UsageError
from bench.harness import Progress
from bench.kernel_cases import CASES, Case, Task, summary
from bench.kernel_timing import Timer, time_in_turn, transfer
from bench.launch import Group
from bench.machine import command_line, describe, environment
from bench.record import write_json
from bench.stats import Spread
from bench.tables import render

KIND = "kernels"
SCHEMA = 1
CEILING = "copy"


def measure(of: tuple[str, str], task: Task, timer: Timer, rounds: int) -> list[dict[str, Any]]:
    """Checks and times every method of one case.

    Args:
        of: names of the model and the case.

    Returns:
        A point per method; `time` in seconds, `gbps` in 1e9 bytes per second, `moved` in bytes.

    Raises:
        CheckFailed: a method's result is not that of the reference.
    """
    for name, way in task.ways.items():
        task.check(name, way)
    source = torch.empty(task.moved // 2, dtype=torch.uint8, device=timer.device).random_()
    target = torch.zeros_like(source)
    times = time_in_turn({CEILING: lambda: target.copy_(source), **task.ways}, timer, rounds)
    return [
        {
            "of": [*of, name],
            "moved": task.moved,
            "time": asdict(Spread.of(seconds)),
            "gbps": task.moved / Spread.of(seconds).median * 1e-9,
            "ratio": asdict(
                Spread.of([mine / its for mine, its in zip(seconds, times[CEILING], strict=True)])
            ),
        }
        for name, seconds in times.items()
    ]


def table(points: list[dict[str, Any]], markdown: bool = False) -> str:
    """GB/s and the share of the ceiling: of transfers, and, in a table of their own, of codecs."""
    codecs = {case.name: case for case in CODEC_CASES}
    transfers = [point for point in points if point["of"][1] not in codecs]
    coded = [point for point in points if point["of"][1] in codecs]
    tables = (
        _transfers_table(transfers, markdown) if transfers else "",
        _codecs_table(coded, codecs, markdown) if coded else "",
    )
    return "\n\n".join(table for table in tables if table)


def _codecs_table(points: list[dict[str, Any]], cases: dict[str, CodecCase], markdown: bool) -> str:
    """One row per format and method, one column per kernel; the ceiling is in each cell."""
    found = {}
    for point in points:
        case, method = cases[point["of"][1]], point["of"][2]
        if method != CEILING:
            found[f"{case.wire}, {method}", case.kind] = point
    kinds = list(dict.fromkeys(kind for _, kind in found))
    rows = [
        (name, *(_cell(found.get((name, kind))) for kind in kinds))
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return render(("GB/s (of ceiling)", *kinds), rows, markdown)


def _transfers_table(points: list[dict[str, Any]], markdown: bool) -> str:
    """One row per method, one column per case."""
    cases = list(dict.fromkeys(point["of"][1] for point in points))
    names = list(dict.fromkeys(point["of"][2] for point in points))
    found = {(point["of"][1], point["of"][2]): point for point in points}
    rows = []
    for name in names:
        cells = (_cell(found.get((case, name))) for case in cases)
        rows.append((name, *cells))
    return render(("GB/s (of ceiling)", *cases), rows, markdown)


def _cell(point: dict[str, Any] | None) -> str:
    if point is None:
        return "-"
    return f"{point['gbps']:.1f} ({1 / point['ratio']['median']:.2f})"


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU here")
    timer, group = Timer(device), Group(0, 1, device)
    every: tuple[Case | CodecCase, ...] = (*CASES, *CODEC_CASES)
    asked = {text.strip() for text in args.cases.split(",")}
    wanted = [case for case in every if asked & {"all", case.name, case.kind}]
    if not wanted:
        kinds = dict.fromkeys(case.kind for case in every)
        known = ", ".join(["all", *kinds, *(case.name for case in every)])
        raise UsageError(f"unknown case {args.cases!r}; expects one of {known}")
    result: dict[str, Any] = {
        "kind": KIND,
        "schema": SCHEMA,
        "command": command_line(),
        "environment": environment(group),
        "settings": {"rounds": args.rounds, "device": device.type},
        "points": [],
    }
    print(describe(result["environment"]))
    progress = Progress(group)
    for name in cli.models(args.models):
        points = []
        workload = cli.workload(name, args)
        for case in wanted:
            progress.show(f"{name}: {case.name}")
            make = case.task if isinstance(case, CodecCase) else partial(transfer, case)
            task = make(workload, device)
            points += measure((workload.name, case.name), task, timer, args.rounds)
        progress.clear()
        result["points"] += points
        print(f"\n{summary(workload)}\n{table(points, args.markdown)}", flush=True)
        if args.json:
            write_json(result, args.json)
    return 0


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default="small,resnet50,wide", help="whose gradients (default: %(default)s)")
    add("--scale", type=float, default=1.0, help="share of the models' parameters (default: 1)")
    add(
        "--cases",
        default="all",
        help="all, or of pack, unpack, encode, reduce, decode, select and single ones by name",
    )
    add("--rounds", type=int, default=11, help="turns of every method (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add("--threads", type=int, default=1, help="torch CPU threads (default: 1)")
    add("--markdown", action="store_true", help="print tables as Markdown")
    add("--json", type=Path, help="write the result to this file")
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
