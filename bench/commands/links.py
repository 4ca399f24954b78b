"""Whole training steps over links of given rates, every way to synchronise side by side.

    python -m bench links --links 1gbit,10gbit,loopback --ranks 2,4 --json out/links.json

Ranks live in network namespaces of their own, joined by veth pairs (and by a bridge where there are
more than two) whose rate is shaped in both directions of every rank. This needs root, `ip` and
`tc`; the exit code is 3 where something of that is missing. The namespaces end with the processes.
Links: a rate such as 100mbit, `veth` for such a pair without shaping, `loopback`.

[Note: What a link allows]
The rate of a link is measured by Gloo's all-reduce of a bare fp32 tensor, in which each of N ranks
sends 2(N-1)/N of its bytes. What a variant has to send is what the formula of its wire format says
(docs/wire.md), scales of blocks included, without padding, flags and headers; the time for that at
the measured rate is its limit, of which backward can hide a part. Synchronisation is the step less
that of `no_sync` in the same round. Bytes are counted by the interface, headers and
acknowledgements included.

On links below 500 Mbit/s the model has an eighth of its size by default.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from typing import Any

from bench.measure import benchmark as b
from bench.measure.bare import all_reduce_rate
from bench.measure.netns import Link, LinkName
from bench.models import WORKLOADS
from bench.report import tables
from bench.report.formulas import variant_bytes
from examples.common.ranks import Group, argument
from examples.common.rounds import checked, model_record, summarise, time_lanes
from examples.common.training import Workload, make_lanes
from examples.common.variants import BASELINE, FLOOR, Variant, select

KIND = "links"


def measure(
    name: LinkName,
    model: Workload,
    variants: tuple[Variant, ...],
    args: argparse.Namespace,
    group: Group,
) -> dict[str, Any]:
    """Time every variant on a link that is shaped for it.

    Returns:
        Times in seconds, sizes in bytes, rates in bytes per second; the same on every rank.
    """
    link = Link.here(group.world)
    # New ones for each link: adaptive settings of one link must not carry over to the next.
    lanes = make_lanes(model, variants, group)
    link.shape(name.rate)
    rate = all_reduce_rate(group, name.bits_per_second)
    measured = time_lanes(lanes, group, b.settings_of(args), link.sent_bytes)
    record: dict[str, Any] = {
        "link": name.name,
        "ranks": group.world,
        "per_node": args.per_node,
        "model": model.name,
        "rate_bytes_per_second": rate,
        **model_record(model, summarise(measured, {})),
    }
    shapes = [p.shape for p in lanes[FLOOR].module.parameters()]
    for variant in variants:
        sent = variant_bytes(variant, shapes, group.world, group.device)
        limit = {"formula_bytes": sent, "limit_seconds": None if sent is None else sent / rate}
        record["variants"][variant.name] |= limit
    return record


@b.benchmark(
    *(b.links("1gbit,10gbit,veth,loopback"), b.ranks(), b.PER_NODE, b.SCALE, b.wrappers("all")),
    argument("--model", ", ".join(WORKLOADS), "wide", choices=tuple(WORKLOADS), metavar="NAME"),
    *(b.seconds(45.0), b.rounds(9), b.steps(1), b.warmup(1), b.check_steps(2)),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Measure the links that this rank's seat allows, one by one."""
    link, verdicts = Link.here(group.world), dict[float, dict[str, str]]()
    variants = select(args.wrappers, required=(FLOOR, BASELINE)).variants
    # By size of the model, so that each is checked once.
    for name in sorted(link.these(args.links), key=lambda n: -n.scale):
        scale = name.scale if args.scale is None else args.scale
        model = WORKLOADS[args.model](scale=scale)
        link.shape(None)  # checking and building would take long on a slow one
        if scale not in verdicts:
            verdicts[scale] = checked(model, variants, group, args.check_steps)
        gc.collect()
        record = measure(name, model, variants, args, group) | {"scale": scale}
        for variant, verdict in verdicts[scale].items():
            record["variants"][variant]["check"] = verdict
        table = tables.link(record["variants"])
        yield b.Shown(f"{tables.link_title(record)}\n{table}", {"links": [record]})
