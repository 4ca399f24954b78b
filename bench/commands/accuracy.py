"""How far averages are from the exact ones, measured against fp64.

    python -m bench accuracy --json out/accuracy.json

Averages of many ranks in the two forms that sum in fp32, next to a backend's own sum in fp16 or
bf16. Ranks are simulated in one process by the kernels that real ranks run; a backend's own sum is
emulated. tests/wire/test_wire_accuracy.py compares both with real ranks, and holds every
block-scaled format against the bounds that csrc/kernels/codec.h states. Exit code 1 where a bound
does not hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.measure import benchmark as b
from examples.common.ranks import CheckFailed, Group
from examples.common.text import Progress
from fastsync._build import extension

WORLDS = (2, 8, 64)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Of one rounding to nearest, relative to the number.
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}
SEED, ELEMENTS = 5, 1 << 18  # of each gradient

Grown = dict[str, list[tuple[int, float, float]]]  # by way: world size, error, share of the bound


def gradients(world: int, numel: int) -> list[Tensor]:
    """Return the gradients to average: a common direction, and noise as strong."""
    generator = torch.Generator().manual_seed(SEED)
    common = torch.randn(numel, generator=generator)
    return [common + torch.randn(numel, generator=generator) for _ in range(world)]


def exact_average(tensors: Sequence[Tensor]) -> Tensor:
    """fp64."""
    return torch.stack([t.double() for t in tensors]).mean(0)


def coded_average(tensors: Sequence[Tensor], name: str, gather: bool = False) -> Tensor:
    """Return the average that every rank would get from a bucket in the format `name`, fp64."""
    averaged: Tensor = extension.load().wire_average(list(tensors), name, gather)
    return averaged.double()


def native_average(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a ring's sum in `dtype` of gradients divided before: each addition rounds. fp64.

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


def one_rounding_each(tensors: Sequence[Tensor], unit: float) -> Tensor:
    """Return the error that rounding each input once, and the result once, can at most make."""
    inputs = torch.stack([t.double().abs() for t in tensors]).mean(0) * unit
    return inputs + (exact_average(tensors).abs() + inputs) * unit


def check_bounds(grown: Grown) -> None:
    """
    Raises:
        CheckFailed: an average in fp32 erred by more than a rounding of each; names it.
    """
    for way, points in grown.items():
        worst = max(share for _, _, share in points)
        if "native" not in way and worst > 1:
            raise CheckFailed(f"{way}: an error is {worst:.2f} times one rounding of each")


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


@b.benchmark(jobs=b.one_process)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Return a row per way, a column per number of ranks."""
    Progress(group).show(f"averaging {ELEMENTS} elements of {WORLDS} ranks")
    grown = growth(WORLDS, ELEMENTS)
    title = (
        "error of averages against fp64, relative to the average, and the largest share of "
        "one rounding of each input and one of the result"
    )
    headers = ["error, 10^-6 (share of the bound)", *(f"{world} ranks" for world in WORLDS)]
    rows = [[way, *(f"{1e6 * e:.1f} ({s:.2f})" for _, e, s in p)] for way, p in grown.items()]
    lines = {way: [(world, error) for world, error, _ in p] for way, p in grown.items()}
    yield b.table(title, headers, rows, lines=lines)
    check_bounds(grown)
