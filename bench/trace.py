"""How much of the communication hides behind computation, from a profile of GPU kernels.

    python -m bench.trace --ranks 2 --sockets --models gpt2 --json out/trace.json --traces out

Profiles a training step of each variant on ranks with GPUs. NCCL's kernels are communication, all
others computation; a time at which only the former run is exposed. It is computed from the
profile's intervals, whose trace is written too (open it in Perfetto or chrome://tracing). An NCCL
kernel also runs while it waits for the other rank. Rank 0 is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import cli, jobs, points
from bench.errors import UsageError
from bench.gpu_timing import Interval, Kernel, device_work, exposed, length
from bench.harness import make_lanes
from bench.launch import Group
from bench.machine import describe, environment
from bench.wrappers import select

KIND = "trace"
WARMUP = 6  # steps
STEPS = 3  # profiled together


def summary(kernels: Sequence[Kernel]) -> tuple[float, float, float]:
    """Seconds of communication, those of them exposed, and from the first kernel to the last."""
    sides: dict[bool, list[Interval]] = {True: [], False: []}
    for kernel in kernels:
        sides[kernel.communicates].append((kernel.start, kernel.end))
    span = max(k.end for k in kernels) - min(k.start for k in kernels) if kernels else 0.0
    return length(sides[True]), exposed(sides[True], sides[False]), span


def table(found: list[points.Point], markdown: bool = False) -> str:
    """One row per variant of one model."""
    headers = ("variant", "step ms", "communication ms", "exposed ms", "hidden")
    return points.rows_of(found, headers, _row, markdown)


def _row(found: points.Point) -> tuple[str, ...]:
    busy, bare = found["communication"], found["exposed"]
    hidden = f"{1 - bare / busy:.0%}" if busy else "-"
    step = f"{1e3 * found['time']['median']:.2f}"
    return (found["of"][1], step, f"{1e3 * busy:.2f}", f"{1e3 * bare:.2f}", hidden)


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does.

    Raises:
        UsageError: there is no GPU.
    """
    if group.device.type != "cuda":
        raise UsageError("a profile of GPU kernels needs a GPU for each rank, or --sockets")
    result: dict[str, Any] = {"environment": environment(group), "points": []}
    if group.is_main:
        print(describe(result["environment"]))
    variants = select(args.wrappers).variants
    for name in cli.models(args.models):
        found = []
        for variant in variants:
            (lane,) = make_lanes(cli.workload(name, args), (variant,), group, None)
            for _ in range(WARMUP):
                lane.step()
            kernels, seen = device_work(lambda: [lane.step() for _ in range(STEPS)], group.device)  # noqa: B023
            busy, bare, span = (seconds / STEPS for seconds in summary(kernels))
            more = {"communication": busy, "exposed": bare}
            found.append(points.point([name, variant.name], [span], **more))
            if group.is_main and args.traces:
                args.traces.mkdir(parents=True, exist_ok=True)
                seen.export_chrome_trace(str(args.traces / f"{name}-{variant.name}.json.gz"))
        result["points"] += found
        if group.is_main:
            print(f"\n{name}\n{table(found, args.markdown)}", flush=True)
            report(result)
    return 0


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = points.parser("trace", __doc__)
    cli.add_arguments(parser, models="gpt2")
    cli.add_sockets_argument(parser)
    parser.add_argument("--traces", type=Path, help="folder for the traces (default: none)")
    points.add_json_argument(parser)
    return parser


def main() -> int:
    args = command().parse_args()
    finish = points.saved(KIND, args)
    todo = [jobs.Job(args.ranks, over_sockets=args.sockets)]
    return cli.guarded(
        lambda: jobs.run_jobs(lambda *context: run(args, *context), todo, args.threads, finish)
    )


if __name__ == "__main__":
    raise SystemExit(main())
