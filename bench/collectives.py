"""The average of gradients over ranks, by size: torch's all-reduce, and all that FastDDP does.

    python -m bench.collectives --ranks 2,4 --link 1gbit --json out/collectives.json

torch's `all_reduce` gets one flat tensor of a dtype. FastDDP gets a bare list of matrices: no
layer computes, gradients of the size in question are handed to its hooks, and what is timed is a
whole backward, with gathering, coding, the collectives and the way back into `param.grad`. Both are
checked against the average in fp64 first. The bytes that FastDDP's engine counts are set against
the formula of the wire format (docs/wire.md); padding and flags come on top, and weigh where there
are few bytes.

[Note: Bandwidth]
As nccl-tests define it, the algorithm bandwidth is S/t and the bus bandwidth 2(N-1)/N S/t, what
each rank sends in that time. S counts 4 bytes per element whatever format travels, so that formats
can be compared: one that halves the bytes may exceed what the link carries.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench import cli, jobs, points
from bench.bare import BareList
from bench.errors import CheckFailed, UsageError
from bench.formulas import bus_factor, wire_bytes
from bench.harness import Progress
from bench.launch import Group
from bench.machine import describe, environment
from bench.netns import Link, LinkName
from bench.wrappers import UNKNOWN_WIRE, WIRE_COSTS, fastsync_name, wire_formats

KIND = "collectives"
TENSORS = 8
SEED = 77
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARMUP = 3

# Averages once and returns the seconds that it took on this rank.
Way = Callable[[], float]


@dataclass(frozen=True)
class Sample:
    """One rank's gradients as a flat tensor, and their average over ranks, rounded from fp64."""

    mine: Tensor
    average: Tensor

    @classmethod
    def of(cls, numel: int, group: Group) -> Sample:
        def values(rank: int) -> Tensor:
            generator = torch.Generator().manual_seed(SEED + rank)
            return torch.randn(numel, generator=generator)

        total = sum((values(rank).double() for rank in range(group.world)), torch.zeros(()))
        average = (total / group.world).float()
        return cls(values(group.rank).to(group.device), average.to(group.device))

    def check(self, name: str, result: Tensor, tolerance: float, group: Group) -> None:
        """
        Raises:
            CheckFailed: on every rank, where a rank's result is too far from the average.
        """
        error = float((result.float() - self.average).norm() / self.average.norm())
        if not group.all_agree(error <= tolerance):
            raise CheckFailed(f"{name}: {error:.1e} of the norm away from the average on a rank")


@dataclass(frozen=True)
class Averaging:
    """A way to average, and the bytes that this rank sends each time, where they are counted."""

    once: Way
    sent: Callable[[], float] | None = None
    formula: float | None = None


def _shapes(numel: int) -> list[tuple[int, int]]:
    """Matrices of `numel` elements in all, as square as their sizes allow."""
    count = min(TENSORS, numel)
    sizes = [numel // count + (i < numel % count) for i in range(count)]
    rows = [next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0) for n in sizes]
    return [(r, n // r) for r, n in zip(rows, sizes, strict=True)]


def _timed(group: Group, call: Callable[[], object]) -> float:
    group.synchronize()
    start = time.perf_counter()
    call()
    group.synchronize()
    return time.perf_counter() - start


def torch_way(sample: Sample, dtype: torch.dtype, group: Group) -> tuple[Way, Tensor]:
    """torch's all-reduce in one dtype, and where the sum will be."""
    buffer = sample.mine.to(dtype, copy=True)
    return lambda: _timed(group, lambda: dist.all_reduce(buffer)), buffer


def fastsync_way(sample: Sample, wire: str, group: Group) -> tuple[Averaging, BareList]:
    """FastDDP with one wire format, and the module that holds the gradients."""
    from fastsync import FastDDP

    shapes = _shapes(sample.mine.numel())
    module = BareList(shapes, group.device)
    model = FastDDP(module, wire=wire)
    flat = sample.mine.split([p.numel() for p in module.list])
    parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    def sent() -> float:
        stats = model.sync_stats()
        return stats.sent_bytes / stats.steps

    def average() -> float:
        model.zero_grad(set_to_none=True)
        module.ready += [part.clone() for part in parts]
        loss = model()
        return _timed(group, loss.backward)

    formula = wire_bytes(wire, shapes, group.world, group.device)
    return Averaging(average, sent, formula), module


def ways(sample: Sample, group: Group) -> dict[str, Averaging]:
    """Every way to average, checked."""
    found: dict[str, Averaging] = {}
    for short, dtype in TORCH_DTYPES.items():
        way, buffer = torch_way(sample, dtype, group)
        way()
        name = f"all_reduce_{short}"
        sample.check(name, buffer / group.world, _tolerance(short), group)
        buffer.zero_()  # sums of sums would overflow soon
        found[name] = Averaging(way)
    for wire in wire_formats():
        name = fastsync_name(wire)
        found[name], module = fastsync_way(sample, wire, group)
        found[name].once()
        result = torch.cat([p.grad.view(-1) for p in module.list if p.grad is not None])
        sample.check(name, result, _tolerance(wire), group)
    return found


def _tolerance(wire: str) -> float:
    return WIRE_COSTS.get(wire, UNKNOWN_WIRE).tolerance or 1e-6


def measure_size(
    found: dict[str, Averaging], args: argparse.Namespace, group: Group
) -> dict[str, list[float]]:
    """Seconds of the slowest rank of every way, in every round."""
    names = list(found)
    results: dict[str, list[float]] = {name: [] for name in names}
    for way in found.values():
        for _ in range(WARMUP):
            way.once()
    for index in range(args.rounds):
        seconds = torch.zeros(len(names), dtype=torch.float64)
        for place in range(len(names)):
            which = (index + place) % len(names)
            dist.barrier()
            seconds[which] = found[names[which]].once()
        for name, value in zip(names, group.max(seconds).tolist(), strict=True):
            results[name].append(value)
    return results


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does: all sizes, on the link that the ranks were placed on."""
    link = LinkName(args.link)
    Link.here(group.world).shape(link.rate)
    facts = environment(group)
    progress, found = Progress(group), []
    if group.is_main:
        print(describe(facts), flush=True)
    for size in parse_sizes(args.sizes):
        progress.show(f"{link.name}: {readable(size)}")
        averagings = ways(Sample.of(size // 4, group), group)
        for name, seconds in measure_size(averagings, args, group).items():
            of = (link.name, f"{group.world} ranks", name, readable(size))
            rate = size / sorted(seconds)[len(seconds) // 2]
            bandwidths = {"algorithm_gbps": rate * 1e-9}
            bandwidths["bus_gbps"] = bandwidths["algorithm_gbps"] * bus_factor(group.world)
            found.append(
                points.point(of, seconds, size=size, **bandwidths, **_bytes(averagings[name]))
            )
    progress.clear()
    if group.is_main:
        print(f"\n{link.name}, {group.world} ranks\n{table(found, args.markdown)}", flush=True)
        report({"environment": facts, "points": found})
    return 0


def _bytes(way: Averaging) -> dict[str, float | None]:
    sent = None if way.sent is None else way.sent()
    return {"sent_bytes": sent, "formula_bytes": way.formula}


def table(found: list[points.Point], markdown: bool = False) -> str:
    """A row per way, a column per size: algorithm and bus bandwidth in GB/s, then bytes sent."""

    def bandwidths(of: points.Point) -> str:
        return f"{of['algorithm_gbps']:.3f} / {of['bus_gbps']:.3f}"

    def counted(of: points.Point) -> str:
        return f"{of['sent_bytes'] / 1024:.1f} ({of['sent_bytes'] / of['formula_bytes']:.3f})"

    known = [point for point in found if point["formula_bytes"]]
    return "\n\n".join(
        [
            points.pivot(found, "algorithm / bus GB/s", (2, 3), bandwidths, markdown),
            points.pivot(known, "KiB sent (of formula)", (2, 3), counted, markdown),
        ]
    )


def parse_sizes(text: str) -> list[int]:
    """Parses sizes in KiB.

    Raises:
        UsageError: there is something else in the list.
    """
    try:
        sizes = [int(float(part) * 1024) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expects sizes in KiB such as 4,1024 but got {text!r}") from None
    if min(sizes) < 4:
        raise UsageError(f"expects sizes that hold an element, but got {text!r} KiB")
    return sizes


def readable(size: float) -> str:
    """A size in bytes, in KiB or MiB."""
    return f"{size / 1024:g} KiB" if size < 2**20 else f"{size / 2**20:g} MiB"


def _start(args: argparse.Namespace) -> int:
    link = LinkName(args.link)
    parse_sizes(args.sizes)
    worlds = jobs.worlds(args.ranks, least=2)
    todo = [jobs.Job(world, link.on_links) for world in worlds]
    save = points.saved(KIND, args)
    return jobs.run_jobs(lambda *context: run(args, *context), todo, args.threads, save)


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = points.parser(KIND, __doc__)
    add = parser.add_argument
    add("--sizes", default="4,64,1024,8192,65536", help="in KiB of fp32 (default: %(default)s)")
    add("--ranks", default="2", help="numbers of ranks, such as 2,4 (default: 2)")
    add("--link", default="loopback", help="loopback, veth or a rate; see bench.links")
    add("--rounds", type=int, default=15, help="turns of every way (default: %(default)s)")
    points.add_arguments(parser)
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: _start(args))


if __name__ == "__main__":
    raise SystemExit(main())
