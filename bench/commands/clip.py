"""Cost of clipping gradients: steps that clip over steps of the same model that do not.

    python -m bench clip --models gpt2 --seconds 120 --json out/clip.json

[Note: Small differences]
Clipping takes less time than the differences between whole steps. So steps of one model, with
AdamW, are compared in blocks of one step per variant, in an order that all ranks draw alike. A
step's time is the mean over the ranks. Clipping does not affect forward and backward: the cost is
the time of a step after its backward, less that of the step without clipping in the same block,
over the median step. The table shows medians and 95 % intervals of order statistics.

The learning rate is 0, so that all steps do the same work. All variants must find the same norms.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from random import Random
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from bench.measure import benchmark as b
from examples.common.ranks import CheckFailed, Group, argument
from examples.common.rounds import FEWEST_ROUNDS, less
from examples.common.text import Progress
from examples.common.training import BATCHES, Lane, Workload, make_lane
from examples.common.variants import OURS, Variant, fast_ddp

STAGES, NONE = ("0", "1", "2"), "not clipped"
CLIPS: dict[str, Callable[[float, Lane], Tensor]] = {
    "`model.clip_grad_norm_`": lambda norm, lane: lane.model.clip_grad_norm_(norm),
    "torch's": lambda norm, lane: clip_grad_norm_(lane.model.parameters(), norm),
}
# What gradients are clipped to, over the norm of the first step's: nothing or everything is scaled.
LIMITS = {"": 1e9, ", which scales": 0.1}
SEED, ALIKE = 5, 1e-4  # the latter: norms of the same gradients, relative

Clip = Callable[[Lane], Tensor | float]  # returns the norm
Steps = Mapping[str, Sequence[Sequence[float]]]  # by way: seconds, and those of them after backward


def make_clips(norm: float) -> dict[str, Clip]:
    """Return every way to clip; `norm` is about that of the gradients."""
    every = product(LIMITS.items(), CLIPS.items())
    ways = {name + scales: partial(clip, limit * norm) for (scales, limit), (name, clip) in every}
    return {NONE: lambda lane: math.nan, **ways}


def step(lane: Lane, clip: Clip, group: Group) -> tuple[float, float, float]:
    """Make one step; return its seconds, those of them after backward, and the norm."""
    norms = []

    def rest() -> None:
        norms.append(float(clip(lane)))
        lane.optimizer.step()

    before, after = group.timed(lambda: lane.forward().backward()), group.timed(rest)
    return before + after, after, norms[0]


def blocks(lane: Lane, group: Group, args: argparse.Namespace) -> Steps:
    """Return the steps of all blocks, means of the ranks.

    Raises:
        CheckFailed: on every rank, where ways find other norms.
    """
    lane.steps(args.warmup)
    first = step(lane, lambda lane: lane.model.clip_grad_norm_(math.inf), group)[-1]
    clips, random, progress = make_clips(first), Random(SEED), Progress(group)
    once = group.most(sum(step(lane, clip, group)[0] for clip in clips.values()))
    count = min(args.rounds, max(FEWEST_ROUNDS, int(args.seconds / once)))
    found: dict[str, list[Sequence[float]]] = {name: [] for name in clips}
    norms: list[list[float]] = [[] for _ in range(BATCHES)]
    for index in range(count):
        progress.show(f"{lane.workload.name}: block {index + 1}/{count}")
        for name in random.sample(list(clips), len(clips)):
            *seconds, norm = step(lane, clips[name], group)
            found[name].append(seconds)
            norms[lane.position % BATCHES] += [norm] if name != NONE else []
    progress.clear()
    check(norms, first, group)
    times = torch.tensor(list(found.values()), device=group.device)
    dist.all_reduce(times)
    return dict(zip(found, (times / group.world).tolist(), strict=True))


def check(norms: Sequence[Sequence[float]], first: float, group: Group) -> None:
    """Raise CheckFailed on every rank where a batch's norms differ, or are too small to scale."""
    off = group.most(max(max(same) - min(same) for same in norms if same) / first)
    if not off <= ALIKE:
        raise CheckFailed(f"ways to clip find norms that differ by {off:.1e}")
    if not group.most(-min(map(min, filter(None, norms)))) < -min(LIMITS.values()) * first:
        raise CheckFailed(f"not all gradients were scaled to {min(LIMITS.values()):g} of the first")


def percent(parts: Sequence[float]) -> str:
    """Return the median of parts of a step and its 95 % interval, by the normal approximation."""
    ordered, count = sorted(parts), len(parts)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2) - 1)
    shown = (f"{100 * part:+.2f}" for part in (median(parts), ordered[low], ordered[-1 - low]))
    return "{} % ({} to {})".format(*shown)


def cells(found: Steps) -> dict[str, str]:
    """Return the cost of each way; without clipping, the step and the number of blocks."""
    whole, rest = ({way: [s[i] for s in steps] for way, steps in found.items()} for i in range(2))
    base = median(whole[NONE])
    costs = {way: [s / base for s in less(rest[way], rest[NONE])] for way in found if way != NONE}
    shown = {way: percent(cost) for way, cost in costs.items()}
    return {NONE: f"{1e3 * base:.1f} ms, {len(whole[NONE])} blocks", **shown}


def make(workload: Workload, stage: str, group: Group) -> Lane:
    """Return a lane whose weights stay as they are."""
    lane = make_lane(workload, Variant(OURS, fast_ddp(zero=int(stage))), group, "adamw")
    lane.optimizer.param_groups[0]["lr"] = 0.0
    return lane


@b.benchmark(
    argument("--stages", "of ZeRO", ",".join(STAGES), type=b.names("stage", STAGES)),
    *(b.models("gpt2"), b.SCALE, b.RANKS, b.rounds(2000), b.warmup(4), b.seconds(60.0)),
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    rows: dict[tuple[str, str], list[str]] = {}
    for name, stage in product(args.models, args.stages):
        lane = make(b.workload(name, args), stage, group)
        for way, shown in cells(blocks(lane, group, args)).items():
            rows.setdefault((f"`zero={stage}`", way), []).append(shown)
    title = "what clipping adds to a step with AdamW; medians and their 95 % intervals"
    yield b.table(title, ("", "way", *args.models), [(*key, *row) for key, row in rows.items()])
