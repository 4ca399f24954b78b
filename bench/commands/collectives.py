"""The average of gradients over ranks, by size: torch's all-reduce, and all that FastDDP does.

    python -m bench collectives --ranks 2,4 --link 1gbit --json out/collectives.json

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure import benchmark as b
from bench.measure.bare import BareList, timed
from bench.measure.formulas import bus_factor, wire_bytes
from bench.measure.netns import Link
from bench.report.charts import readable
from bench.report.tables import point
from examples.common.ranks import CheckFailed, Group, UsageError, argument
from examples.common.rounds import in_turn, slowest
from examples.common.text import Progress, quantile
from examples.common.variants import fastsync_name, tolerance_of
from fastsync.wire.formats import wire_formats

KIND = "collectives"
TENSORS = 8
SEED = 77
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARMUP = 3


@dataclass(frozen=True)
class Sample:
    """One rank's gradients as a flat tensor, and their average over ranks, rounded from fp64."""

    mine: Tensor
    average: Tensor

    @classmethod
    def of(cls, numel: int, group: Group) -> Sample:
        def values(rank: int) -> Tensor:
            return torch.randn(numel, generator=torch.Generator().manual_seed(SEED + rank))

        total = sum((values(rank).double() for rank in range(group.world)), torch.zeros(()))
        average = (total / group.world).float()
        return cls(values(group.rank).to(group.device), average.to(group.device))

    def check(self, name: str, result: Tensor, wire: str, group: Group) -> None:
        """
        Raises:
            CheckFailed: on every rank, where a rank's result is too far from the average.
        """
        error = float((result.float() - self.average).norm() / self.average.norm())
        if not group.all_agree(error <= (tolerance_of(wire) or 1e-6)):
            raise CheckFailed(f"{name}: {error:.1e} of the norm away from the average on a rank")


@dataclass(frozen=True)
class Averaging:
    """A way to average: `once` returns the seconds that it took on this rank, `sent` the bytes that
    it sends each time, where they are counted."""

    once: Callable[[], float]
    sent: Callable[[], float | None] = lambda: None
    formula: float | None = None


def _shapes(numel: int) -> list[tuple[int, int]]:
    """Matrices of `numel` elements in all, as square as their sizes allow."""
    count = min(TENSORS, numel)
    sizes = [numel // count + (i < numel % count) for i in range(count)]
    rows = [next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0) for n in sizes]
    return [(r, n // r) for r, n in zip(rows, sizes, strict=True)]


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
        return timed(group, loss.backward)

    return Averaging(average, sent, wire_bytes(wire, shapes, group.world, group.device)), module


def ways(sample: Sample, group: Group) -> dict[str, Averaging]:
    """Every way to average, checked."""
    found: dict[str, Averaging] = {}
    for wire, dtype in TORCH_DTYPES.items():
        name, buffer = f"all_reduce_{wire}", sample.mine.to(dtype, copy=True)
        dist.all_reduce(buffer)
        sample.check(name, buffer / group.world, wire, group)
        buffer.zero_()  # sums of sums would overflow soon
        found[name] = Averaging(lambda b=buffer: timed(group, lambda: dist.all_reduce(b)))  # type: ignore[misc]
    for wire in wire_formats():
        name = fastsync_name(wire)
        found[name], module = fastsync_way(sample, wire, group)
        found[name].once()
        result = torch.cat([p.grad.view(-1) for p in module.list if p.grad is not None])
        sample.check(name, result, wire, group)
    return found


def _sizes(text: str) -> b.Items[int]:
    sizes = b.Items.of((int(kib * 1024) for kib in b.numbers(float, unit="KiB")(text)), text)
    if min(sizes) < 4:
        raise UsageError(f"expects sizes that hold an element, but got {text!r} KiB")
    return sizes


@b.benchmark(
    argument("--sizes", "in KiB of fp32", "4,64,1024,8192,65536", type=_sizes),
    *(b.ranks(), b.LINK, b.rounds(15)),
    kind=KIND,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """All sizes, on the link that the ranks were placed on."""
    Link.here(group.world).shape(args.link.rate)
    progress, found = Progress(group), []
    scene = (args.link.name, f"{group.world} ranks")
    for size in args.sizes:
        progress.show(f"{args.link.name}: {readable(size)}")
        every = ways(Sample.of(size // 4, group), group)
        in_turn(every, lambda name: every[name].once(), WARMUP)  # noqa: B023
        times = slowest(in_turn(every, lambda name: every[name].once(), args.rounds), group)  # noqa: B023
        for name, seconds in times.items():
            rate = 1e-9 * size / quantile(seconds, 0.5)
            bandwidths = {"algorithm_gbps": rate, "bus_gbps": rate * bus_factor(group.world)}
            counts = {"sent_bytes": every[name].sent(), "formula_bytes": every[name].formula}
            of = (*scene, name, readable(size))
            found.append(point(of, seconds, size=size, **bandwidths, **counts))
    yield b.points(", ".join(scene), found, args, KIND)
