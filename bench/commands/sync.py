"""Steps, bytes and peaks of ranks that average now and then, over a shaped link.

    python -m bench sync --link 100mbit --json out/sync.json

Two nodes of two ranks each train in each mode of `sync=`, in turn. A burst is one sync round, from
a moment with nothing on its way to the next such moment; a step is its mean, on the slowest rank.
Where gradients are averaged at every step, a burst has two steps. Local SGD of accelerate and
torchft is beside ours where they are installed. The model computes by waiting:
16 ns a step for each parameter, as a GPU of 200 TFLOP/s takes for half a million tokens. Bytes
and peaks are counted by the interface. A peak is the most that leaves a node in a tenth of a
second.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch.distributed as dist

from bench.measure import benchmark as b
from bench.measure.netns import Link, LinkName, PeakMeter
from bench.measure.peers import Attach, peers
from bench.models.paced import paced
from examples.common.ranks import Group, argument, whole
from examples.common.rounds import in_turn, over, slowest
from examples.common.text import Progress, Spread
from examples.common.training import Lane, make_lanes
from examples.common.variants import Variant, Wrap, ddp, fast_ddp
from fastsync import ChunkedTopK, DiLoCo, LocalSGD, TopK

ALONE, REFERENCE, STREAMED = "no synchronisation", "every step", ", streamed"
REFERENCE_STEPS = 2
EVERY, FRAGMENTS, OVERLAP = 64, 24, 2
SECONDS = 16e-9  # that a step computes, for each parameter
ELEMENTS = 24 * 1024 * 1024  # of the model at scale 1


def ways(every: int, per_node: int) -> Mapping[str, Wrap]:
    """Return what is compared, by name; "streamed" follows what sends all at once."""
    fragments = min(FRAGMENTS, every)
    stream: dict[str, Any] = {
        "fragments": fragments,
        "overlap": min(OVERLAP, every // fragments - 1),
    }
    nodes: dict[str, Any] = {"wire": "int4", "within": per_node}
    mode = partial(DiLoCo, every)
    modes = {
        f"LocalSGD({every})": LocalSGD(every),
        f"DiLoCo({every})": mode(),
        f"DiLoCo({every}{STREAMED})": mode(**stream),
        f"DiLoCo({every}, int4)": mode(wire="int4"),
        f"DiLoCo({every}, int4{STREAMED})": mode(wire="int4", **stream),
        f"DiLoCo({every}, int4, within={per_node})": mode(**nodes),
        f"DiLoCo({every}, int4, within={per_node}{STREAMED})": mode(**nodes, **stream),
        f"DiLoCo({every}, topk 1/64)": mode(wire=TopK(1 / 64)),
        f"DiLoCo({every}, chunked topk 1/64)": mode(wire=ChunkedTopK(1 / 64)),
    }
    known: dict[str, Wrap] = {ALONE: lambda module, device: module, REFERENCE: ddp()}
    return known | {name: fast_ddp(sync=mode) for name, mode in modes.items()}


def burst(lane: Lane, steps: int, group: Group, link: Link) -> list[float]:
    """Return seconds and bytes of a step, and the most bytes that leave a node in a window."""
    dist.barrier()
    before = link.sent_bytes()
    with PeakMeter(link) as meter:
        seconds = group.timed(lambda: lane.steps(steps))
        dist.barrier()
    return [seconds / steps, (link.sent_bytes() - before) / steps, meter.most]


def measure(
    args: argparse.Namespace, others: Mapping[str, Attach], group: Group, link: Link
) -> dict[str, list[list[float]]]:
    """Return the bursts of each way, in turn, as `burst` does."""
    model = paced(args.scale, SECONDS * ELEMENTS * args.scale)
    wraps = ways(args.every, args.per_node)
    wraps = {**wraps, **dict.fromkeys(others, wraps[ALONE])}
    lanes = make_lanes(model, [Variant(*way) for way in wraps.items()], group, "sgd")
    with ExitStack() as opened:
        for name, attach in others.items():
            attach(lanes[name], group, opened)
        return measure_lanes(lanes, args, group, link)


def measure_lanes(
    lanes: Mapping[str, Lane], args: argparse.Namespace, group: Group, link: Link
) -> dict[str, list[list[float]]]:
    """Return the bursts of each lane, in turn."""
    for lane in lanes.values():
        # From here on a burst of `every` steps merges all that it sends.
        lane.steps(OVERLAP)
    link.shape(args.link.rate)
    progress = Progress(group)

    def once(name: str) -> list[float]:
        progress.show(name)
        steps = REFERENCE_STEPS if name == REFERENCE else args.every
        return burst(lanes[name], steps, group, link)

    found = slowest(in_turn(lanes, once, args.rounds), group)
    link.shape(None)
    return found


@b.benchmark(
    argument("--link", "loopback, veth or a rate, see links", "100mbit", type=LinkName),
    argument("--ranks", "processes to start; torchrun's wins", 4, type=whole),
    argument("--per-node", "ranks behind each link, as on one machine", 2, type=whole),
    argument("--scale", "share of 25 M parameters", 0.2, type=b.positive),
    argument("--every", "steps of a sync round", EVERY, type=whole),
    b.rounds(9),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Return steps beside those of ranks that never synchronise, bytes, and peaks."""
    others, missing = peers(args.every, OVERLAP, STREAMED)
    if group.is_main and missing:
        print("\n".join(missing))
    found = measure(args, others, group, Link.here(group.world))
    columns = {name: list(zip(*rows, strict=True)) for name, rows in found.items()}
    alone, whole_sent = columns[ALONE][0], median(columns[REFERENCE][1])
    rows = []
    for name, (step, sent, peak) in columns.items():
        ratio = "" if name == REFERENCE else b.with_margin(over(step, alone))
        fewer = "" if name == ALONE else f"1/{whole_sent / median(sent):.0f}"
        at_once = columns[name.replace(STREAMED, "")][2]
        less = f"{Spread.of(over(peak, at_once)).median:.2f}" if STREAMED in name else ""
        cells = [f"{1e3 * median(step):,.1f}", ratio, f"{median(sent) / 1e3:,.1f}", fewer]
        rows.append([f"`{name}`", *cells, f"{median(peak) / PeakMeter.WINDOW / 1e6:.2f}", less])
    headers = ["mode", "step ms", "of none", "kB sent a step", "of every step"]
    headers += ["peak MB/s", "of all at once"]
    libraries = dict.fromkeys(name.partition(".")[0] for name in others)
    versions = "".join(f", {library} {version(library)}" for library in libraries)
    title = (
        f"{group.world} ranks in {group.world // args.per_node} nodes over {args.link.name}, "
        f"{ELEMENTS * args.scale / 1e6:.1f} M parameters{versions}; {b.MARGIN}"
    )
    yield b.table(title, headers, rows)
