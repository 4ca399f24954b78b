"""How much communication stays exposed, against the least that model and link allow.

    python -m bench.overlap --links 1gbit,10gbit --backward 0.5,1,2 --json out/overlap.json

Trained are models whose backward sleeps instead of computing: on two cores, computation and
communication would compete for the processor, and the wire would not be the limit. In `paced` the
layers end at fixed times, as those of a device do; in `waiting` each sleeps for a time, so that
whatever keeps the host lengthens its backward, and shows as exposed. Backward is made as long as
the wire needs for all gradients in fp32, times the factors of --backward.

Exposed is the step less that of `no_sync` in the same round. The least is that of
bench/overlap_model.py, from the ready times of single gradients as seen without synchronisation,
the bits of the wire format and the rate that an all-reduce reaches on the same link; for FastDDP
also the least for its own plan of buckets. `bare` shows what processors and backend make of that
least: an all-reduce for each gradient, where it is, which neither packs nor averages.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bench import cli, jobs, points
from bench.bare import BareCollectives
from bench.errors import UsageError
from bench.formulas import bus_factor
from bench.harness import Progress, Settings, Timing, make_lanes, summarise, time_lanes
from bench.launch import Group
from bench.link_steps import all_reduce_rate
from bench.machine import describe, environment
from bench.models import WAITING, WORKLOADS
from bench.netns import Link, LinkName, bits_per_second, parse_links
from bench.overlap_model import bucketed, least_exposed
from bench.stats import quantile
from bench.tables import render
from bench.training import Lane
from bench.wrappers import FLOOR, Variant, available, select

KIND = "overlap"
SHOWN = ("ddp", "ddp_batched_view", "fastsync", "fastsync_bf16")
BARE = Variant("bare", "collectives alone", lambda module, device: BareCollectives(module))
PROBES = 3


@dataclass(frozen=True)
class Ready:
    """When gradients arrive in a backward that nothing is synchronised in.

    Attributes:
        order: indices of the parameters, as their gradients arrive.
        seconds: when each arrives after the start, by parameter.
        sizes: elements of each parameter.
        backward: the length of the backward, in seconds.
    """

    order: list[int]
    seconds: list[float]
    sizes: list[int]
    backward: float


def observe(lane: Lane) -> Ready:
    """Runs a few steps of a lane that does not synchronise; each time is a median."""
    parameters = list(lane.module.parameters())
    seen: list[list[float]] = [[] for _ in parameters]
    lengths = []
    start = 0.0

    def arrived(index: int, _: Tensor) -> None:
        seen[index].append(time.perf_counter() - start)

    handles = [
        p.register_post_accumulate_grad_hook(lambda p, index=index: arrived(index, p))
        for index, p in enumerate(parameters)
    ]
    for _ in range(PROBES):
        lane.optimizer.zero_grad(set_to_none=True)
        loss = lane.workload.loss(lane.model(lane.batches[0]))
        start = time.perf_counter()
        loss.backward()
        lengths.append(time.perf_counter() - start)
    for handle in handles:
        handle.remove()
    seconds = [quantile(times, 0.5) for times in seen]
    order = sorted(range(len(parameters)), key=lambda index: seconds[index])
    return Ready(order, seconds, [p.numel() for p in parameters], quantile(lengths, 0.5))


def least(variant: Variant, lane: Lane, ready: Ready, rate: float, world: int) -> dict[str, Any]:
    """The least exposed seconds of a variant: of any, and of FastDDP's own buckets; or None."""
    if variant.cost.bits is None or variant.name == FLOOR:
        return {"least": None, "least_of_plan": None}
    per_element = bus_factor(world) * variant.cost.bits / 8 / rate
    durations = [size * per_element for size in ready.sizes]
    alone = [ready.seconds[i] for i in ready.order], [durations[i] for i in ready.order]
    return {
        "least": least_exposed(*alone, ready.backward),
        "least_of_plan": _least_of_plan(lane, ready, durations) if variant.wire else None,
    }


def _least_of_plan(lane: Lane, ready: Ready, durations: list[float]) -> float:
    model: Any = lane.model
    buckets = [bucket.params for bucket in model.reducer.engine.plan.buckets]
    return least_exposed(*bucketed(ready.seconds, durations, buckets), ready.backward)


@dataclass(frozen=True)
class Scene:
    """One link, one model, and a length of its backward in units of the wire's time for fp32."""

    link: LinkName
    model: str
    factor: float
    rate: float


def measure(scene: Scene, args: argparse.Namespace, group: Group) -> list[points.Point]:
    """A point per variant: `time` is the exposed one; the ranks are placed on the link."""
    link = Link.here(group.world)
    link.shape(None)  # building the lanes broadcasts their weights
    dist.barrier()
    workload = WORKLOADS[scene.model](scale=args.scale)
    elements = sum(p.numel() for p in workload.build().parameters())
    seconds = scene.factor * bus_factor(group.world) * 4 * elements / scene.rate
    workload = WORKLOADS[scene.model](scale=args.scale, seconds=seconds)
    variants = (*select(args.wrappers, required=(FLOOR, args.baseline)).variants, BARE)
    lanes = make_lanes(workload, variants, group, None)
    ready = observe(lanes[[v.name for v in variants].index(FLOOR)])
    link.shape(scene.link.rate)
    dist.barrier()
    settings = Settings(args.rounds, 1, args.warmup, 0, args.baseline, seconds=args.seconds)
    results = time_lanes(lanes, group, settings, Progress(group), link.sent_bytes)
    measured = dict(zip((v.name for v in variants), results, strict=True))
    timings = summarise(measured, {}, args.baseline)
    name = (scene.link.name, f"{group.world} ranks", scene.model, f"{scene.factor:g}")
    return [
        _point((*name, v.name), t, least(v, lane, ready, scene.rate, group.world), ready)
        for v, t, lane in zip(variants, timings, lanes, strict=True)
    ]


def _point(
    of: tuple[str, ...], timing: Timing, bounds: dict[str, Any], ready: Ready
) -> points.Point:
    if timing.exposed is None:
        raise AssertionError(f"{FLOOR} is always measured")
    extra = {"step": asdict(timing.step), "backward": ready.backward, **bounds}
    return {"of": list(of), "time": asdict(timing.exposed), **extra}


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does: those of the links that its place allows."""
    link = Link.here(group.world)
    facts, found = environment(group), []
    if group.is_main:
        print(describe(facts), flush=True)
    for name in parse_links(args.links):
        if name.on_links != (link.seat is not None):
            continue
        link.shape(name.rate)
        dist.barrier()
        expected = None if name.rate is None else bits_per_second(name.rate) / 8
        rate = all_reduce_rate(group, expected)
        scenes = itertools.product(parse_models(args.models), parse_factors(args.backward))
        for model, factor in scenes:
            added = measure(Scene(name, model, factor, rate), args, group)
            found += added
            if group.is_main:
                print(f"\n{title(added, rate)}\n{table(added, args.markdown)}", flush=True)
                report({"environment": facts, "points": found})
    return 0


def title(found: list[points.Point], rate: float) -> str:
    """What was measured, in a line."""
    link, ranks, model, factor, _ = found[0]["of"]
    backward = 1e3 * found[0]["backward"]
    return (
        f"{link}, {ranks}, {8e-9 * rate:.3f} Gbit/s; {model}, backward {backward:.0f} ms, "
        f"{factor} x the wire's time for fp32"
    )


def table(found: list[points.Point], markdown: bool = False) -> str:
    """One row per variant; times in ms."""

    def bound(of: points.Point, key: str) -> tuple[str, str]:
        if of[key] is None:
            return "-", "-"
        least = 1e3 * of[key]
        return f"{least:.1f}", f"{1e3 * of['time']['median'] / least:.2f}" if least else "-"

    rows = [
        (
            of["of"][-1],
            f"{1e3 * of['step']['median']:.1f}",
            points.milliseconds(of),
            *bound(of, "least"),
            *bound(of, "least_of_plan"),
        )
        for of in found
    ]
    headers = ("variant", "step ms", "exposed ms", "least", "ratio", "least of plan", "ratio")
    return render(headers, rows, markdown)


def parse_models(text: str) -> list[str]:
    """Parses names of models that wait.

    Raises:
        UsageError: there is something else in the list.
    """
    models = [name.strip() for name in text.split(",")]
    if not set(models) <= set(WAITING):
        raise UsageError(f"expects --models of {', '.join(WAITING)} but got {text!r}")
    return models


def parse_factors(text: str) -> list[float]:
    """Parses factors such as "0.5,1".

    Raises:
        UsageError: there is something else in the list.
    """
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expects factors such as 0.5,1 but got {text!r}") from None
    if min(factors) <= 0:
        raise UsageError(f"expects positive factors but got --backward {text}")
    return factors


def _start(args: argparse.Namespace) -> int:
    links, worlds = parse_links(args.links), jobs.worlds(args.ranks, least=2)
    parse_factors(args.backward)
    parse_models(args.models)
    select(args.wrappers, required=(FLOOR, args.baseline))
    kinds = [k for k in (True, False) if any(link.on_links == k for link in links)]
    todo = [jobs.Job(world, on_links) for world in worlds for on_links in kinds]
    save = points.saved(KIND, args)
    return jobs.run_jobs(lambda *context: run(args, *context), todo, args.threads, save)


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = points.parser(KIND, __doc__)
    add = parser.add_argument
    add("--links", default="1gbit", help="see bench.links (default: %(default)s)")
    add("--ranks", default="2", help="numbers of ranks, such as 2,4 (default: 2)")
    add("--models", default=",".join(WAITING), help="(default: %(default)s)")
    add("--backward", default="0.5,1,2", help="of the wire's time (default: %(default)s)")
    add(
        "--wrappers", default=available(*SHOWN), help="of bench.step, or all (default: %(default)s)"
    )
    add("--baseline", default="ddp", help="the first of the variants (default: ddp)")
    add("--scale", type=float, default=1.0, help="share of the 25 M parameters (default: 1)")
    add("--rounds", type=int, default=5, help="at most (default: %(default)s)")
    add("--warmup", type=int, default=1, help="steps before the first round (default: 1)")
    add("--seconds", type=float, default=30.0, help="per table, about (default: 30)")
    points.add_arguments(parser)
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: _start(args))


if __name__ == "__main__":
    raise SystemExit(main())
