"""How far averages are from the exact ones, measured against fp64.

    python -m bench accuracy --json out/accuracy.json

First, averages of many ranks: the two-shot form, which sums in fp32, next to a backend's own sum in
fp16 or bf16. Then averages of hostile numbers in every block-scaled format, next to the bounds that
csrc/kernels/codec.h states. Ranks are simulated in one process by the kernels that real ranks run;
a backend's own sum is emulated, and that emulation compared with Gloo on two real ranks. Exit code
1 where a bound does not hold or the emulation is not what Gloo does.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure import benchmark as b
from bench.measure.jobs import Job
from examples.common.machine import environment, write_json
from examples.common.ranks import CheckFailed, Group, argument, whole
from examples.common.text import Progress
from fastsync.build import extension
from fastsync.testing import run_ranks
from fastsync.wire.formats import FORMATS

WORLDS = (2, 8, 64)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Of one rounding to nearest, relative to the number.
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}
# Of a block-scaled code, relative to the number, and to the largest of its block: the larger holds.
BOUNDS = {
    "fp16": (2.0**-11, 2.0**-39),
    "fp8_e4m3": (2.0**-4, 2.0**-17),
    "fp8_e5m2": (2.0**-3, 2.0**-31),
    "int8": (0.0, 1 / 252),
    "int4": (0.0, 1 / 13.8),
}
SMALLEST = 2.0**-127
SEED = 5

Grown = dict[str, list[tuple[int, float, float]]]  # by way: world size, error, share of the bound
Shares = dict[str, dict[str, float]]  # by format and kind of numbers


def gradients(world: int, numel: int) -> list[Tensor]:
    """What ranks might have to average: a common direction, and noise as strong."""
    generator = torch.Generator().manual_seed(SEED)
    common = torch.randn(numel, generator=generator)
    return [common + torch.randn(numel, generator=generator) for _ in range(world)]


def exact_average(tensors: Sequence[Tensor]) -> Tensor:
    """fp64."""
    return torch.stack([t.double() for t in tensors]).mean(0)


def coded_average(tensors: Sequence[Tensor], name: str, gather: bool = False) -> Tensor:
    """What every rank would get of a bucket in the format `name`, fp64."""
    averaged: Tensor = extension.load().wire_average(list(tensors), name, gather)
    return averaged.double()


def native_average(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A ring's sum in `dtype` of gradients divided before: each addition rounds. fp64.

    In a ring of N ranks the chunk c starts at rank c and visits the others in turn.
    """
    world = len(tensors)
    parts = [torch.tensor_split((t / world).to(dtype), world) for t in tensors]
    chunks = []
    for chunk in range(world):
        total = parts[chunk][chunk]
        for step in range(1, world):
            total = total + parts[(chunk + step) % world][chunk]
        chunks.append(total)
    return torch.cat(chunks).double()


def gloo_average(rank: int, world: int, numel: int, name: str) -> Tensor:
    """The same by Gloo, on a real rank."""
    mine = (gradients(world, numel)[rank] / world).to(DTYPES[name])
    dist.all_reduce(mine)
    return mine.double()


def one_rounding_each(tensors: Sequence[Tensor], unit: float) -> Tensor:
    """The error that rounding each input once, and the result once, can at most make."""
    inputs = torch.stack([t.double().abs() for t in tensors]).mean(0) * unit
    return inputs + (exact_average(tensors).abs() + inputs) * unit


def block_bound(values: Tensor, name: str) -> Tensor:
    """The largest error of coding fp64 `values` in a block-scaled format, element by element."""
    block = FORMATS[name].block
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % block)).view(-1, block)
    relative, of_largest = BOUNDS[name]
    bound = torch.maximum(padded * relative, padded.amax(1, keepdim=True) * of_largest)
    return bound.clamp_min(SMALLEST).flatten()[: len(values)]


def two_shot_bound(tensors: Sequence[Tensor], name: str) -> Tensor:
    """The largest error of an average: that of each input's code, and of the average's own.

    The sum itself is fp32, a rounding for each of its additions, and so is the decoded number.
    """
    world = len(tensors)
    scaled = [t.double() / world for t in tensors]
    inputs = torch.stack([block_bound(s, name) for s in scaled]).sum(0)
    sums = exact_average(tensors).abs() + inputs
    in_fp32 = torch.stack([s.abs() for s in scaled]).sum(0) * (world + 1) * 2.0**-24
    return inputs + block_bound(sums, name) + in_fp32 + SMALLEST


def hostile(numel: int) -> dict[str, Callable[[int], Tensor]]:
    """Numbers that a shared scale suits badly, by rank."""

    def noise(rank: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(SEED + rank))

    def outliers(rank: int) -> Tensor:
        values = noise(rank)
        values[:: 97 + rank] *= 1e4
        return values

    def mixed(rank: int) -> Tensor:
        powers = torch.arange(numel) * 7 % 61 - 30
        return noise(rank) * 2.0**powers

    return {
        "normal": noise,
        "outliers": outliers,
        "mixed magnitudes": mixed,
        "constant": lambda rank: torch.full((numel,), 0.1 * (rank + 1)),
        "denormal": lambda rank: noise(rank) * 1e-39,
        "near fp32's limit": lambda rank: noise(rank).clamp(-1, 1) * 1e38,
        "one in a block": lambda rank: torch.where(
            torch.arange(numel) % 256 == rank, noise(rank), torch.zeros(())
        ),
    }


def growth(worlds: Sequence[int], numel: int) -> Grown:
    """World size, error relative to the average, and the largest share of the bound, by way."""
    found: Grown = {}
    for world in worlds:
        tensors = gradients(world, numel)
        exact = exact_average(tensors)
        for name, dtype in DTYPES.items():
            bound = one_rounding_each(tensors, UNIT[name])
            ways = {
                f"{name}, two-shot": coded_average(tensors, name),
                f"{name}, gathered": coded_average(tensors, name, gather=True),
                f"{name}, native sum": native_average(tensors, dtype),
            }
            for way, average in ways.items():
                share = float(((average - exact).abs() / bound).max())
                relative = float((average - exact).norm() / exact.norm())
                found.setdefault(way, []).append((world, relative, share))
    return found


def block_shares(numel: int, world: int = 4) -> Shares:
    """The largest share of its bound that an error reaches, by format and kind of numbers."""
    shares: Shares = {name: {} for name in BOUNDS}
    for name, (kind, make) in itertools.product(BOUNDS, hostile(numel).items()):
        tensors = [make(rank) for rank in range(world)]
        error = (coded_average(tensors, name) - exact_average(tensors)).abs()
        shares[name][kind] = float((error / two_shot_bound(tensors, name)).max())
    return shares


def check_bounds(grown: Grown, shares: Shares) -> None:
    """Whether every bound holds.

    Raises:
        CheckFailed: one does not; names it.
    """
    for way, points in grown.items():
        worst = max(share for _, _, share in points)
        if "native" not in way and worst > 1:
            raise CheckFailed(f"{way}: an error is {worst:.2f} times one rounding of each")
    for name, kinds in shares.items():
        for kind, share in kinds.items():
            if not share <= 1:
                raise CheckFailed(f"{name}, {kind}: an error is {share:.2f} times its bound")


@b.benchmark(
    argument("--elements", "of each gradient", 1 << 18, type=whole),
    argument("--quick", "4096 elements: seconds", action="store_true"),
    jobs=lambda args: [Job(0)],
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Two tables; the second one's file is named `-blocks`."""
    numel, progress = 1 << 12 if args.quick else args.elements, Progress(group)
    progress.show("comparing the emulated sum with Gloo's on two ranks")
    for name, dtype in DTYPES.items():
        emulated = native_average(gradients(2, numel), dtype)
        if not all(torch.equal(real, emulated) for real in run_ranks(gloo_average, 2, numel, name)):
            raise CheckFailed(f"Gloo's {name} sum on two ranks is not the emulated one")
    progress.show(f"averaging {numel} elements of {', '.join(map(str, WORLDS))} ranks")
    grown = growth(WORLDS, numel)
    progress.show("coding hostile numbers")
    shares = block_shares(numel)
    kinds = list(next(iter(shares.values())))
    title = "largest error of averages of 4 ranks, as a share of the stated bound"
    rows = [[name, *(f"{found[kind]:.2f}" for kind in kinds)] for name, found in shares.items()]
    blocks = b.table(title, ["format", *kinds], rows, args)
    print(f"\n{blocks.text}")
    title = (
        "error of averages against fp64, relative to the average, and the largest share of "
        "one rounding of each input and one of the result"
    )
    headers = ["error, 10^-6 (share of the bound)", *(f"{world} ranks" for world in WORLDS)]
    rows = [[way, *(f"{1e6 * e:.1f} ({s:.2f})" for _, e, s in p)] for way, p in grown.items()]
    lines = {way: [(world, error) for world, error, _ in p] for way, p in grown.items()}
    yield b.table(title, headers, rows, args, lines=lines)
    check_bounds(grown, shares)
    if args.json:
        part = {"environment": environment(group), **blocks.part}
        path = args.json.with_name(f"{args.json.stem}-blocks{args.json.suffix}")
        write_json(main.result(args, [part]), path)
