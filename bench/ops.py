"""Operators dispatched on the CPU in one training step: the host's cost of synchronisation.

Counted are the CPU events of torch.profiler over one optimizer.zero_grad(), forward and
backward, after warm-up. The count does not depend on the machine's speed: it is exact and can be
compared between machines with the same torch. Work in C++ that calls no operator is not seen.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from bench import cli
from bench.launch import Group, launch
from bench.models import Workload
from bench.record import add_json_argument, publish
from bench.training import make_lane
from bench.wrappers import Variant, select

WARMUP = 3


def dispatched_ops(workload: Workload, variant: Variant, group: Group) -> int:
    """CPU events of one step without the optimizer's; the largest of all ranks."""
    lane = make_lane(workload, variant, group, optimizer=None)
    for _ in range(WARMUP):
        lane.step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        lane.step()
    events = profiler.events() or []
    return int(group.max(torch.tensor([len(events)])).item())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ops", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_arguments(parser, models="ops400")
    add_json_argument(parser)
    args = parser.parse_args()

    def run(group: Group) -> int:
        models = cli.models(args.models)
        rows = []
        for variant in select(args.wrappers).variants:
            counts = [dispatched_ops(cli.workload(name, args), variant, group) for name in models]
            rows.append((variant.name, *map(str, counts)))
        title = "operators dispatched per step (zero_grad, forward, backward)"
        publish(title, ("variant", *models), rows, group, args)
        return 0

    return cli.guarded(lambda: launch(run, args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
