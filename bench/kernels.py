"""Bandwidth of pack and unpack, beside what torch offers, against this machine's own copies.

    python -m bench.kernels --models gpt2,resnet50 --json out/kernels.json

A kernel gathers the gradients of a model into one flat buffer (pack) or scatters a buffer (unpack);
on the way it multiplies by 1/N and casts. Every way to do that is checked against the same thing
done in fp64, then timed, all of them in turn. GB/s counts each element once read and once written,
however often a method touches it; the ceiling is a plain copy of as many bytes between two buffers
of this machine's memory, and `of ceiling` is the share of its bandwidth in the same round. On a GPU
the times are those of events on its stream.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import cli
from bench.errors import UsageError
from bench.harness import Progress
from bench.kernel_cases import CASES, PACK, UNPACK, Case, Scattered, make_scattered, methods
from bench.kernel_timing import Timer, check, time_in_turn
from bench.launch import Group
from bench.machine import command_line, describe, environment
from bench.record import write_json
from bench.stats import Spread
from bench.tables import render

KIND = "kernels"
SCHEMA = 1
CEILING = "copy"


def measure(case: Case, gradients: Scattered, timer: Timer, rounds: int) -> list[dict[str, Any]]:
    """Checks and times every method of one case.

    Returns:
        A point per method; `time` in seconds, `gbps` in 1e9 bytes per second.

    Raises:
        CheckFailed: a method's result is not that of the reference.
    """
    ways = methods(case, gradients)
    for name, way in ways.items():
        check(name, case, gradients, way)
    source = torch.zeros(gradients.bytes_moved(case) // 2, dtype=torch.uint8, device=timer.device)
    target = torch.zeros_like(source)
    times = time_in_turn({CEILING: lambda: target.copy_(source), **ways}, timer, rounds)
    moved = gradients.bytes_moved(case)
    return [
        {
            "of": [gradients.name, case.name, name],
            "time": asdict(Spread.of(seconds)),
            "gbps": moved / Spread.of(seconds).median * 1e-9,
            "ratio": asdict(
                Spread.of([mine / its for mine, its in zip(seconds, times[CEILING], strict=True)])
            ),
        }
        for name, seconds in times.items()
    ]


def table(points: list[dict[str, Any]], markdown: bool = False) -> str:
    """One row per method, one pair of columns per case: GB/s and the share of the ceiling."""
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
    wanted = [case for case in CASES if args.cases in ("all", case.name, case.kind)]
    if not wanted:
        known = ", ".join(["all", PACK, UNPACK, *(case.name for case in CASES)])
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
        for case in wanted:
            progress.show(f"{name}: {case.name}")
            gradients = make_scattered(cli.workload(name, args), case, device)
            points += measure(case, gradients, timer, args.rounds)
        progress.clear()
        result["points"] += points
        print(f"\n{gradients.summary}\n{table(points, args.markdown)}", flush=True)
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
    add("--cases", default="all", help="all, pack, unpack, or a case by name")
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
