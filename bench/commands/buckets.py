"""Step time against the size of buckets, FastDDP's own plan among them.

    python -m bench buckets --models wide,transformer --link 1gbit --json out/buckets.json

Each size is `bucket_cap_mb` of FastDDP and of torch's best configuration; `default` is what either
does where nothing is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from bench.measure import benchmark as b
from bench.measure.netns import Link
from bench.report.tables import point
from examples.common.ranks import Group, argument
from examples.common.rounds import time_lanes
from examples.common.training import make_lanes
from examples.common.variants import FLOOR, OURS, UNAVAILABLE, VARIANTS, Variant, ddp, fast_ddp

KIND = "buckets"
TORCH = "ddp_batched_view"


def variant(family: str, cap: float | None) -> Variant:
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": cap}
    options |= {} if TORCH in UNAVAILABLE else {"batched_grad_copy": True}
    label = "default" if cap is None else f"{cap:g} MiB"
    return Variant(f"{family}|{label}", (fast_ddp if family == OURS else ddp)(**options))


@b.benchmark(
    *(b.models("wide,transformer"), b.SCALE),
    argument("--sizes", "in MiB", "1,4,10,25,50,200", type=b.numbers(float, unit="MiB")),
    *(b.LINK, b.ranks(), b.rounds(9), b.steps(2), b.seconds(45.0)),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """One model after the other; `plan` holds the bytes of FastDDP's buckets."""
    link, caps = Link.here(group.world), [None, *args.sizes]
    named = {variant(f, cap): cap for f in (OURS, TORCH) for cap in caps}
    scene = (args.link.name, f"{group.world} ranks")
    for name in args.models:
        link.shape(None)  # wrapping broadcasts the weights
        lanes = make_lanes(b.workload(name, args), (VARIANTS[FLOOR], *named), group)
        link.shape(args.link.rate)
        measured = time_lanes(lanes, group, b.settings_of(args))
        found = [point((*scene, name, FLOOR, "-"), measured[FLOOR].seconds)]
        for sized, cap in named.items():
            of, model = sized.name.split("|"), lanes[sized.name].model
            plan = list(model.sync_stats()["buckets"]) if of[0] == OURS else None
            more = {"plan": plan, "cap_mib": cap}
            found.append(point((*scene, name, *of), measured[sized.name].seconds, **more))
        yield b.points(f"{args.link.name}, {name}", found, KIND)
