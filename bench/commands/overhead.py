"""Cost of synchronisation beside the model: device time, host time and kernels of a step.

    python -m bench overhead --ranks 1 --models gpt2,resnet50,small --json out/overhead.json
    python -m bench overhead --ranks 2 --sockets --models gpt2 --traces out
    python -m bench overhead --ranks 2 --models gpt2 --wrappers fastsync_weights --over fastsync

With one rank there is nothing to send, so a step should cost as much as without a wrapper.
Variants run in bursts, in turn; ratios are taken within a round. The steps of a burst follow each
other without a wait for the device. `host` is the time that `backward()` occupies the host.

On a GPU, steps of rank 0 are then profiled. NCCL's kernels are communication, all others
computation; a time at which only the former run is exposed. --traces writes the profiles too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.measure import benchmark as b
from bench.measure.gpu import WARMUP, device_work, launches, run_burst, summary
from bench.report.tables import point
from examples.common.ranks import Group, argument
from examples.common.rounds import checked, in_turn, over, slowest
from examples.common.text import Progress, Spread
from examples.common.training import Lane, make_lanes
from examples.common.variants import FLOOR, select

KIND = "overhead"
PROFILED = 3  # steps, together


def profiled(lane: Lane, group: Group, trace: Path | None) -> dict[str, Any]:
    """Return a step's kernels, and seconds of total and exposed communication; None on a CPU."""
    if group.device.type != "cuda":
        return dict.fromkeys(("kernels", "communication", "exposed"))
    kernels, seen = device_work(lambda: lane.steps(PROFILED), group.device)
    if group.is_main and trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(trace))
    busy, bare = (seconds / PROFILED for seconds in summary(kernels))
    return {"kernels": launches(kernels) // PROFILED, "communication": busy, "exposed": bare}


@b.benchmark(
    *(b.models("gpt2,resnet50,small"), b.SCALE, b.wrappers("all")),
    *(b.ranks("1", least=1), b.SOCKETS),
    *(b.rounds(15), b.steps(8), b.check_steps(4)),
    argument("--over", "wrapper that ratios are taken over", FLOOR),
    argument("--traces", "folder for the traces; unset: none", type=Path),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Return a point per variant of each model; the times are those of the slowest rank."""
    variants, progress = select(args.wrappers, required=(args.over,)).variants, Progress(group)
    for model in args.models:
        workload, found = b.workload(model, args), []
        checked(workload, variants, group, args.check_steps)
        lanes = make_lanes(workload, variants, group)
        for lane in lanes.values():
            progress.show(f"{model}: warming up")
            run_burst(lane, group.device, WARMUP)

        def once(name: str) -> tuple[float, float]:
            dist.barrier()
            return run_burst(lanes[name], group.device, args.steps)  # noqa: B023

        def show(index: int) -> None:
            progress.show(f"{model}: round {index + 1}/{args.rounds}")  # noqa: B023

        worst = slowest(in_turn(lanes, once, args.rounds, show), group)
        steps = {name: [step for step, _ in bursts] for name, bursts in worst.items()}
        for name, lane in lanes.items():
            trace = args.traces and args.traces / f"{model}-{name}.json.gz"
            ratio = asdict(Spread.of(over(steps[name], steps[args.over])))
            host = asdict(Spread.of([host for _, host in worst[name]]))
            more = {"host": host, "ratio": ratio, "over": args.over}
            more |= profiled(lane, group, trace)
            found.append(point((model, name), steps[name], **more))
        yield b.points(model, found, KIND)
