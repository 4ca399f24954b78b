"""All-reduce written out as a ring: 2(N-1) steps of sends and receives, every byte counted.

Each rank cuts its tensor of M bytes into N chunks. In N-1 steps every chunk travels once around the
ring and is added up on its way (reduce-scatter); in N-1 further steps the finished chunks travel
around (all-gather). So each rank sends 2(N-1) chunks of M/N bytes, 2(N-1)/N * M in all, whatever N
is. P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009).

    python -m examples.ring_allreduce --ranks 4

shows the chunks after every step, then compares results and bytes for several sizes with
torch.distributed.all_reduce and the formula. Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from examples.common.ranks import Group, argument, run_example, whole
from examples.common.text import render

Chunks = Sequence[Tensor]
Watch = Callable[[str, Chunks], None]


@dataclass
class Ring:
    """This rank's place in the ring of all ranks, the bytes that it has sent, and in how many
    exchanges with its neighbours."""

    sent: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def exchange(self, outgoing: Tensor, incoming: Tensor) -> None:
        """One step: sends to the next rank while receiving from the previous one."""
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, (self.rank + 1) % self.size))
            self.sent += outgoing.nbytes
        if incoming.numel():
            operations.append(dist.P2POp(dist.irecv, incoming, (self.rank - 1) % self.size))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        self.steps += 1


def reduce_scatter(ring: Ring, chunks: Chunks, watch: Watch) -> None:
    """Add up the ranks' chunks in place, in N-1 steps.

    Rank r then holds the finished chunk r + 1, and partial sums of the others.
    """
    n, rank = ring.size, ring.rank
    for step in range(n - 1):
        mine, theirs = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(theirs)
        ring.exchange(mine, received)
        theirs += received
        watch("reduce-scatter", chunks)


def all_gather(ring: Ring, chunks: Chunks, watch: Watch) -> None:
    """Spread the chunks that `reduce_scatter` has finished, in N-1 steps."""
    n, rank = ring.size, ring.rank
    for step in range(n - 1):
        ring.exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])
        watch("all-gather", chunks)


def split(tensor: Tensor, parts: int) -> Chunks:
    """`parts` consecutive views whose lengths differ by one element at most.

    Raises:
        ValueError: the tensor is not contiguous, so there are no such views.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"expects a contiguous tensor but got strides {tensor.stride()}")
    return tensor.view(-1).tensor_split(parts)


def ring_all_reduce(tensor: Tensor, ring: Ring, watch: Watch = lambda *_: None) -> None:
    """Replace `tensor` by its sum over the ranks, the same bits on each of them.

    Args:
        tensor: contiguous, of the same shape and dtype on every rank.
        watch: called after each step with the name of the phase and the chunks.
    """
    chunks = split(tensor, ring.size)
    reduce_scatter(ring, chunks, watch)
    all_gather(ring, chunks, watch)


def trace(group: Group) -> list[str]:
    """Return the chunks of every rank after each step, by the ranks whose parts they contain.

    Rank r contributes the bit 1 << r to every chunk, so that a sum tells who is in it.
    """
    ring, lines = Ring(), [f"  {'':<18}rank: its chunks, by the ranks summed in them"]
    tensor = torch.full((group.world,), 1 << group.rank, device=group.device)

    def members(bits: int) -> str:
        return "".join(str(r) for r in range(group.world) if bits >> r & 1)

    def note(phase: str, chunks: Chunks) -> None:
        everyone = [torch.empty_like(tensor) for _ in range(group.world)]
        dist.all_gather(everyone, tensor)
        for rank, sums in enumerate(everyone):
            title = f"{ring.steps:>2} {phase}" if rank == 0 else ""
            held = "  ".join(members(int(s)).ljust(group.world) for s in sums.tolist())
            lines.append(f"  {title:<18}{rank}: {held}")

    note("start", ())
    ring_all_reduce(tensor, ring, note)
    return lines


@dataclass(frozen=True)
class Check:
    """One all-reduce held against torch's and against the formula.

    Attributes:
        steps, sent: exchanges of this rank, and the bytes that it sent.
        formula: 2(N-1)/N * M, in bytes.
        sent_by_all: bytes that all ranks sent together: exactly N times the formula.
        error: largest difference from torch's sum, relative to the largest sum of magnitudes.
        alike: whether all ranks hold the same bits.
    """

    steps: int
    sent: int
    formula: Fraction
    sent_by_all: int
    error: float
    alike: bool


def check(group: Group, numel: int, dtype: torch.dtype) -> Check:
    generator = torch.Generator().manual_seed(group.rank)
    mine = torch.randn(numel, generator=generator).mul(100).to(group.device, dtype)
    expected, magnitudes, ring = mine.clone(), mine.abs(), Ring()
    dist.all_reduce(expected)
    dist.all_reduce(magnitudes)
    ring_all_reduce(mine, ring)
    total = torch.tensor(ring.sent, device=group.device)
    dist.all_reduce(total)
    return Check(
        steps=ring.steps,
        sent=ring.sent,
        formula=Fraction(2 * (group.world - 1) * mine.nbytes, group.world),
        sent_by_all=int(total),
        error=float((mine.double() - expected.double()).abs().max() / magnitudes.max()),
        alike=group.alike(mine),
    )


def passes(found: Check, world: int, dtype: torch.dtype) -> bool:
    """Integers must be exact; two orders of N-1 additions may differ by N-1 roundings each."""
    slack = (world - 1) * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    counted = found.sent_by_all == world * found.formula
    return found.steps == 2 * (world - 1) and counted and found.alike and found.error <= slack


def run(args: argparse.Namespace, group: Group) -> int:
    dtype, failed, rows = torch.float32, False, []
    lines = trace(group) if group.world <= 8 else []
    for numel in args.numel:
        found = check(group, numel, dtype)
        good = group.all_agree(passes(found, group.world, dtype))
        failed |= not good
        numbers = (found.steps, found.sent, f"{float(found.formula):.1f}", found.sent_by_all)
        verdict = "equal" if good else "DIFFERENT"
        rows.append((str(numel), *(str(n) for n in numbers), f"{found.error:.1e}", verdict))
    if group.is_main:
        print("\n".join(lines))
        n = group.world
        print(f"\n  all-reduce of fp32 over N = {n} ranks, M bytes each, seen by rank 0\n")
        headers = ("elements", "steps", "sent", "2(N-1)/N M", "all sent", "error", "torch's")
        print(render(headers, rows))
        print("\n  sent: bytes; chunks of M/N bytes are rounded to whole elements, so a rank may")
        print("  be two elements off the formula; all together send exactly N times as much")
    return 1 if failed else 0


if __name__ == "__main__":
    sizes = [1, 1_000, 1_000_003, 4_000_000]
    numel = argument("--numel", "elements", sizes, type=whole, nargs="+")
    raise SystemExit(run_example("ring_allreduce", __doc__, run, numel, ranks=4))
