"""How much communication stays exposed, against the least that model and link allow.

    python -m bench overlap --links 1gbit,10gbit --backward 0.5,1,2 --json out/overlap.json

Trained is a model whose backward sleeps instead of computing: on two cores, computation and
communication would compete for the processor, and the wire would not be the limit. Its layers end
at fixed times, as those of a device do. Backward is made as long as the wire needs for all
gradients in fp32, times the factors of --backward.

Exposed is the step less that of `no_sync` in the same round. The least is that of
bench/report/formulas.py, from the ready times of single gradients as seen without synchronisation,
the bits of the wire format and the rate that an all-reduce reaches on the same link; for FastDDP
also the least for its own plan of buckets. `bare` shows what processors and backend make of that
least: an all-reduce for each gradient, where it is, which neither packs nor averages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from torch import Tensor

from bench.measure import benchmark as b
from bench.measure.bare import BARE, all_reduce_rate
from bench.measure.netns import Link, LinkName
from bench.models.paced import paced
from bench.report.formulas import bucketed, bus_factor, least_exposed
from bench.report.tables import Point
from examples.common.ranks import Group, argument
from examples.common.rounds import summarise, time_lanes
from examples.common.training import Lane, make_lanes
from examples.common.variants import BASELINE, FLOOR, Variant, available, select

KIND = "overlap"
SHOWN = available("ddp", "ddp_batched_view", "fastsync", "fastsync_bf16")
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

    @classmethod
    def seen(cls, lane: Lane) -> Ready:
        """Run a few steps of a lane that does not synchronise; each time is a median."""
        parameters = list(lane.module.parameters())
        arrivals: list[list[float]] = [[] for _ in parameters]
        lengths, start = [], 0.0

        def arrived(index: int, _: Tensor) -> None:
            arrivals[index].append(time.perf_counter() - start)

        handles = [
            p.register_post_accumulate_grad_hook(lambda p, index=index: arrived(index, p))
            for index, p in enumerate(parameters)
        ]
        for _ in range(PROBES):
            loss = lane.forward()
            start = time.perf_counter()
            loss.backward()
            lengths.append(time.perf_counter() - start)
        for handle in handles:
            handle.remove()
        seconds = [median(times) for times in arrivals]
        order = sorted(range(len(parameters)), key=lambda index: seconds[index])
        return cls(order, seconds, [p.numel() for p in parameters], median(lengths))

    def least(self, variant: Variant, lane: Lane, rate: float, world: int) -> dict[str, Any]:
        """Return a variant's least exposed seconds: of any plan, and of FastDDP's own; or None."""
        bounds: dict[str, Any] = {"least": None, "least_of_plan": None}
        if variant.bits is None or variant.name == FLOOR:
            return bounds
        durations = [size * bus_factor(world) * variant.bits / 8 / rate for size in self.sizes]
        plans = {"least": [[index] for index in self.order]}
        if variant.wire:
            plans["least_of_plan"] = [b.params for b in lane.model.reducer.engine.plan.buckets]
        for name, plan in plans.items():
            sent = bucketed(self.seconds, durations, plan)
            bounds[name] = least_exposed(*sent, self.backward)
        return bounds


def measure(
    name: LinkName, factor: float, rate: float, args: argparse.Namespace, group: Group
) -> list[Point]:
    """Return a point per variant: `time` is the exposed one; the ranks are placed on the link.

    Args:
        factor: the length of backward in units of the wire's time for fp32.
    """
    link = Link.here(group.world)
    link.shape(None)  # building the lanes broadcasts their weights
    elements = sum(p.numel() for p in paced(args.scale).build().parameters())
    seconds = factor * bus_factor(group.world) * 4 * elements / rate
    variants = (*select(args.wrappers, required=(FLOOR, BASELINE)).variants, BARE)
    lanes = make_lanes(paced(args.scale, seconds), variants, group)
    ready = Ready.seen(lanes[FLOOR])
    link.shape(name.rate)
    measured = time_lanes(lanes, group, b.settings_of(args), link.sent_bytes)
    found = []
    for timing in summarise(measured, {}):
        variant = next(v for v in variants if v.name == timing.variant)
        times = {"time": asdict(timing.exposed), "step": asdict(timing.step)}
        least = ready.least(variant, lanes[variant.name], rate, group.world)
        of = [name.name, f"{group.world} ranks", "paced", f"{factor:g}", variant.name]
        found.append({"of": of, **times, "backward": ready.backward, **least})
    return found


@b.benchmark(
    *(b.links("1gbit"), b.ranks()),
    argument("--backward", "of the wire's time", "0.5,1,2", type=b.numbers(float)),
    argument("--scale", "share of the 25 M parameters", 1.0, type=b.positive),
    *(b.wrappers(SHOWN), b.rounds(5)),
    *(b.steps(1), b.warmup(1), b.seconds(30.0)),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Measure the links that this rank's seat allows."""
    link = Link.here(group.world)
    for name in link.these(args.links):
        link.shape(name.rate)
        rate = all_reduce_rate(group, name.bits_per_second)
        for factor in args.backward:
            found = measure(name, factor, rate, args, group)
            backward = f"backward {1e3 * found[0]['backward']:.0f} ms"
            scene = f"{name.name}, {group.world} ranks, {8e-9 * rate:.3f} Gbit/s; {backward}"
            title = f"{scene}, {factor:g} x the wire's time for fp32"
            yield b.points(title, found, KIND)
