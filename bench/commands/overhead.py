"""What synchronisation costs beside the model: device time, host time and kernels of a step.

    python -m bench overhead --ranks 1 --models gpt2,resnet50,small --json out/overhead.json

With one rank there is nothing to send, so a step should cost what it costs without a wrapper.
Variants run in bursts, in turn, and ratios are taken within a round. A burst's steps follow each
other without waiting for the device: where the GPU is the slower side its time is measured,
else the host's. `host` is the time that `backward()` keeps the host. Kernels are those of one step
under torch's profiler, on a GPU; the rest also runs on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict

import torch.distributed as dist

from bench.measure import benchmark as b
from bench.measure.gpu import WARMUP, device_work, launches, run_burst
from bench.report.tables import point
from examples.common.ranks import Group
from examples.common.rounds import checked, in_turn, over, slowest
from examples.common.text import Progress, Spread
from examples.common.training import make_lanes
from examples.common.variants import FLOOR, select

KIND = "overhead"


@b.benchmark(
    *(b.models("gpt2,resnet50,small"), b.SCALE, b.wrappers("all")),
    *(b.ranks("1", least=1), b.SOCKETS),
    *(b.rounds(15), b.steps(8), b.check_steps(4)),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """A point per variant of each model; the times are those of the slowest rank."""
    variants, progress = select(args.wrappers, required=(FLOOR,)).variants, Progress(group)
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
            on_gpu, host = group.device.type == "cuda", [host for _, host in worst[name]]
            count = launches(device_work(lane.step, group.device)[0]) if on_gpu else None
            ratio = asdict(Spread.of(over(steps[name], steps[FLOOR])))
            more = {"host": asdict(Spread.of(host)), "ratio": ratio, "kernels": count}
            found.append(point((model, name), steps[name], **more))
        yield b.points(model, found, KIND)
