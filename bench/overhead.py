"""What synchronisation costs beside the model: device time, host time and kernels of a step.

    python -m bench.overhead --ranks 1 --models gpt2,resnet50,vit,small --json out/overhead.json

With one rank there is nothing to send, so a step should cost what it costs without a wrapper.
Variants run in bursts, in turn, and ratios are taken within a round. A burst's steps follow each
other without waiting for the device: where the GPU is the slower side its time is measured,
else the host's. `host` is the time that `backward()` keeps the host. Kernels are those of one step
under torch's profiler, on a GPU; the rest also runs on a CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from bench import cli, jobs, points
from bench.check import check_variants
from bench.gpu_timing import Burst, device_work, launches, run_burst
from bench.harness import Progress, make_lanes
from bench.launch import Group
from bench.machine import describe, environment
from bench.models import Workload
from bench.stats import Spread
from bench.training import Lane
from bench.wrappers import FLOOR, Variant, select

KIND = "overhead"
WARMUP = 6  # steps: a plan is renewed after the first, and cuDNN and the allocator settle


def measure(
    workload: Workload, variants: tuple[Variant, ...], group: Group, args: argparse.Namespace
) -> list[points.Point]:
    """A point per variant; the times are those of the slowest rank.

    Raises:
        bench.errors.CheckFailed: a variant trains other weights than default DDP.
    """
    progress = Progress(group)
    if args.check_steps:
        progress.show(f"{workload.name}: checking that all variants train the same weights")
        check_variants(workload, variants, group, args.check_steps)
    lanes = make_lanes(workload, variants, group, None)
    for lane in lanes:
        progress.show(f"{workload.name}: warming up")
        run_burst(lane, group.device, WARMUP)
    rounds: list[list[Burst]] = [[] for _ in lanes]
    for index in range(args.rounds):
        progress.show(f"{workload.name}: round {index + 1}/{args.rounds}")
        for place in range(len(lanes)):
            which = (index + place) % len(lanes)
            dist.barrier()
            rounds[which].append(run_burst(lanes[which], group.device, args.steps))
    progress.clear()
    counts = [_kernels(lane, group) for lane in lanes]
    return _points(workload, variants, _slowest(rounds, group), counts)


def _slowest(rounds: list[list[Burst]], group: Group) -> list[list[Burst]]:
    times = [[[burst.step, burst.host] for burst in mine] for mine in rounds]
    worst = group.max(torch.tensor(times, dtype=torch.float64)).tolist()
    return [[Burst(*pair) for pair in mine] for mine in worst]


def _kernels(lane: Lane, group: Group) -> int | None:
    if group.device.type != "cuda":
        return None
    return launches(device_work(lane.step, group.device)[0])


def _points(
    workload: Workload,
    variants: tuple[Variant, ...],
    rounds: list[list[Burst]],
    counts: list[int | None],
) -> list[points.Point]:
    floor = rounds[[variant.name for variant in variants].index(FLOOR)]
    return [
        points.point(
            [workload.name, variant.name],
            [burst.step for burst in mine],
            host=asdict(Spread.of([burst.host for burst in mine])),
            ratio=asdict(
                Spread.of([a.step / b.step for a, b in zip(mine, floor, strict=True)]),
            ),
            kernels=count,
        )
        for variant, mine, count in zip(variants, rounds, counts, strict=True)
    ]


def table(found: list[points.Point], markdown: bool = False) -> str:
    """One row per variant of one model."""
    return points.rows_of(
        found,
        ("variant", "step ms", f"of {FLOOR}", "backward, host ms", "kernels"),
        _row,
        markdown,
    )


def _row(found: points.Point) -> tuple[str, ...]:
    ratio, host = Spread(**found["ratio"]), Spread(**found["host"])
    return (
        found["of"][1],
        points.milliseconds(found),
        f"{ratio.median:.3f} ± {ratio.width / 2:.3f}",
        f"{1e3 * host.median:.2f}",
        "-" if found["kernels"] is None else str(found["kernels"]),
    )


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does: all models, one after the other."""
    selection = select(args.wrappers, required=(FLOOR,))
    result: dict[str, Any] = {"environment": environment(group), "points": []}
    if group.is_main:
        print(describe(result["environment"]))
        for name, reason in selection.skipped.items():
            print(f"skipped {name}: {reason}")
    for name in cli.models(args.models):
        found = measure(cli.workload(name, args), selection.variants, group, args)
        result["points"] += found
        if group.is_main:
            print(f"\n{name}\n{table(found, args.markdown)}", flush=True)
            report(result)
    return 0


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = points.parser("overhead", __doc__)
    cli.add_arguments(parser, models="gpt2,resnet50,vit,small", several_worlds=True)
    cli.add_sockets_argument(parser)
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="bursts of each variant (default: %(default)s)")
    add("--steps", type=int, default=8, help="steps in a burst (default: %(default)s)")
    add("--check-steps", type=int, default=4, help="0: no correctness check")
    points.add_json_argument(parser)
    parser.set_defaults(ranks="1")
    return parser


def main() -> int:
    args = command().parse_args()
    worlds = jobs.worlds(args.ranks)
    todo = [jobs.Job(world, over_sockets=args.sockets) for world in worlds]
    finish = points.saved(KIND, args)
    return cli.guarded(
        lambda: jobs.run_jobs(lambda *context: run(args, *context), todo, args.threads, finish)
    )


if __name__ == "__main__":
    raise SystemExit(main())
