"""Step time against the size of buckets, FastDDP's own plan among them.

    python -m bench.buckets --models wide,transformer --link 1gbit --json out/buckets.json

Each size is `bucket_cap_mb` of FastDDP and of torch's best configuration; `default` is what either
does where nothing is said. FastDDP's own plan begins with a small bucket, so that communication
starts early, and continues with large ones.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench import cli, jobs, points
from bench.errors import UsageError
from bench.harness import Progress, Settings, make_lanes, summarise, time_lanes
from bench.launch import Group
from bench.machine import describe, environment
from bench.netns import Link, LinkName
from bench.training import Lane
from bench.wrappers import FLOOR, VARIANTS, Variant

KIND = "buckets"
OURS, TORCH = "fastsync", "ddp_batched_view"
DEFAULT = "default"


def variant(family: str, cap: float | None) -> Variant:
    """FastDDP or torch's DDP with buckets of `cap` MiB."""

    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        from fastsync import FastDDP

        kind: Any = FastDDP if family == OURS else DistributedDataParallel
        ids = None if device.type == "cpu" else [device.index]
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": cap}
        if VARIANTS[TORCH].unavailable() is None:
            options["batched_grad_copy"] = True
        wrapped: nn.Module = kind(module, device_ids=ids, **options)
        return wrapped

    return Variant(f"{family} {_label(cap)}", "", wrap)


def _label(cap: float | None) -> str:
    return DEFAULT if cap is None else f"{cap:g} MiB"


def measure(name: str, args: argparse.Namespace, group: Group) -> list[points.Point]:
    """A point per family and size of one model; `plan` holds the bytes of FastDDP's buckets."""
    link = Link.here(group.world)
    link.shape(None)  # wrapping broadcasts the weights
    dist.barrier()
    caps = [None, *sizes(args.sizes)]
    named = [(family, cap) for family in (OURS, TORCH) for cap in caps]
    variants = (VARIANTS[FLOOR], *(variant(*pair) for pair in named))
    lanes = make_lanes(cli.workload(name, args), variants, group, None)
    wanted = LinkName(args.link)
    link.shape(wanted.rate)
    dist.barrier()
    baseline = variants[1].name
    settings = Settings(args.rounds, args.steps, 2, 0, baseline, seconds=args.seconds)
    progress = Progress(group)
    results = time_lanes(lanes, group, settings, progress)
    progress.clear()
    measured = dict(zip((v.name for v in variants), results, strict=True))
    timings = {t.variant: t for t in summarise(measured, {}, baseline)}
    found = [points.point((*_scene(wanted, group), name, FLOOR, "-"), timings[FLOOR].rounds)]
    for (family, cap), lane in zip(named, lanes[1:], strict=True):
        timing = timings[f"{family} {_label(cap)}"]
        of = (*_scene(wanted, group), name, family, _label(cap))
        found.append(points.point(of, timing.rounds, plan=_plan(family, lane), cap_mib=cap))
    return found


def _scene(link: LinkName, group: Group) -> tuple[str, str]:
    return link.name, f"{group.world} ranks"


def _plan(family: str, lane: Lane) -> list[int] | None:
    model: Any = lane.model
    return list(model.sync_stats()["buckets"]) if family == OURS else None


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does: one model after the other."""
    facts = environment(group)
    found: list[points.Point] = []
    if group.is_main:
        print(describe(facts), flush=True)
    for name in cli.models(args.models):
        added = measure(name, args, group)
        found += added
        if group.is_main:
            print(f"\n{args.link}, {name}\n{table(added, args.markdown)}", flush=True)
            report({"environment": facts, "points": found})
    return 0


def table(found: list[points.Point], markdown: bool = False) -> str:
    """Milliseconds of a step: a row per size, a column per family."""
    return points.pivot(found, "step ms", (4, 3), points.milliseconds, markdown)


def sizes(text: str) -> list[float]:
    """Parses sizes in MiB.

    Raises:
        UsageError: there is something else in the list.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expects sizes in MiB such as 1,25 but got {text!r}") from None
    if min(found) <= 0:
        raise UsageError(f"expects positive sizes but got --sizes {text}")
    return found


def _start(args: argparse.Namespace) -> int:
    link = LinkName(args.link)
    sizes(args.sizes)
    cli.models(args.models)
    todo = [jobs.Job(world, link.on_links) for world in jobs.worlds(args.ranks, least=2)]
    save = points.saved(KIND, args)
    return jobs.run_jobs(lambda *context: run(args, *context), todo, args.threads, save)


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = points.parser(KIND, __doc__)
    add = parser.add_argument
    add("--models", default="wide,transformer", help="see bench.step (default: %(default)s)")
    add("--scale", type=float, help="share of a model's parameters (default: by the model)")
    add("--sizes", default="1,4,10,25,50,200", help="in MiB (default: %(default)s)")
    add("--link", default="loopback", help="loopback, veth or a rate; see bench.links")
    add("--ranks", default="2", help="numbers of ranks, such as 2,4 (default: 2)")
    add("--rounds", type=int, default=9, help="at most (default: %(default)s)")
    add("--steps", type=int, default=2, help="timed steps in a burst (default: %(default)s)")
    add("--seconds", type=float, default=45.0, help="per model, about (default: 45)")
    points.add_arguments(parser)
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: _start(args))


if __name__ == "__main__":
    raise SystemExit(main())
