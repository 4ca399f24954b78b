"""How much of the communication hides behind computation, from a profile of GPU kernels.

    python -m bench trace --ranks 2 --sockets --models gpt2 --json out/trace.json --traces out

Profiles a training step of each variant on ranks with GPUs. NCCL's kernels are communication, all
others computation; a time at which only the former run is exposed. It is computed from the
profile's intervals, whose trace is written too (open it in Perfetto or chrome://tracing). An NCCL
kernel also runs while it waits for the other rank. Rank 0 is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bench.measure import benchmark as b
from bench.measure.gpu import WARMUP, device_work, summary
from bench.report.tables import point
from examples.common.ranks import Group, UsageError, argument
from examples.common.training import make_lane
from examples.common.variants import select

KIND = "trace"
STEPS = 3  # profiled together


@b.benchmark(
    *(b.models("gpt2"), b.SCALE, b.wrappers("all"), b.RANKS, b.SOCKETS),
    argument("--traces", "folder for the traces; unset: none", type=Path),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """
    Raises:
        UsageError: there is no GPU.
    """
    if group.device.type != "cuda":
        raise UsageError("a profile of GPU kernels needs a GPU for each rank, or --sockets")
    for name in args.models:
        found = []
        for variant in select(args.wrappers).variants:
            lane = make_lane(b.workload(name, args), variant, group, None)
            for _ in range(WARMUP):
                lane.step()
            kernels, seen = device_work(lambda: [lane.step() for _ in range(STEPS)], group.device)  # noqa: B023
            busy, bare, span = (seconds / STEPS for seconds in summary(kernels))
            found.append(point((name, variant.name), [span], communication=busy, exposed=bare))
            if group.is_main and args.traces:
                args.traces.mkdir(parents=True, exist_ok=True)
                seen.export_chrome_trace(str(args.traces / f"{name}-{variant.name}.json.gz"))
        yield b.points(name, found, KIND)
