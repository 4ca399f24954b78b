"""Whether models learn as well in every wire format as in fp32: losses of whole trainings.

    python -m bench curves --json out/curves.json

A byte-level GPT and a residual conv net are trained from the same weights on the same data, once in
each format. The loss that counts is that of held-out data after the last step. Exit code 1 where it
is more than 1 % above that of fp32, which runs once more from weights nudged by 1e-4 of their size.

Top-k is judged as docs/tuning.md recommends it; what it reaches when nothing is chosen is shown
beside it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import benchmark as b
from bench.models import WORKLOADS
from examples import data, gpt
from examples.common.ranks import CheckFailed, Group, argument, whole
from examples.common.training import rate_share
from fastsync import FastDDP, TopK, Wire
from fastsync.wire.formats import wire_formats

REFERENCE, CHOSEN = "fp32", ", recommended"
NUDGED, NUDGE = "fp32, nudged", 1e-4
TOLERANCE = 0.01
STEPS, WARMUP_STEPS = 400, 20
POINTS = 24  # of a curve
CLASSES, SIDE = 10, 32
WAVES, NOISE = 4.0, 1.0
MISLABELLED = 0.3  # keeps the loss above 0, where shares of it mean something
BUCKET_MIB = 0.5  # several buckets also in a small model


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes:
        loss: of a model and a batch.
        batch: for a rank and a step.
        held_out: batches that are not trained on.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]
    held_out: Callable[[], Sequence[Any]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


def gpt_task() -> Task:
    """Return the GPT of examples/ in small: the standard library's own text, byte by byte."""
    corpus = data.load()
    shape = gpt.Shape(width=64, layers=2)
    return Task(
        build=lambda: gpt.build(shape=shape),
        loss=lambda model, windows: model(windows),
        batch=lambda rank, step: corpus.batch(rank, step, 16, shape.length),
        held_out=lambda: corpus.validation_batch(512, shape.length).split(64),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)),
    )


def gratings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images of waves, in as many directions as there are classes, under noise.

    Returns:
        fp32 [count, 3, SIDE, SIDE], and int64 [count]: the direction, or any where mislabelled.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randint(CLASSES, (count,), generator=generator)
    phase = 2 * math.pi * torch.rand(count, generator=generator)
    angle = math.pi * direction / CLASSES
    place = torch.linspace(0, 2 * math.pi * WAVES, SIDE)
    x, y = place[None, None, :], place[None, :, None]
    turned = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    waves = (turned + phase[:, None, None]).sin()[:, None]
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    other = torch.randint(CLASSES, (count,), generator=generator)
    wrong = torch.rand(count, generator=generator) < MISLABELLED
    return waves + NOISE * noise, torch.where(wrong, other, direction)


def conv_task() -> Task:
    """Return the conv net of bench/models in small: the direction of noisy waves."""
    workload = WORKLOADS["conv"](scale=1 / 64)
    return Task(
        build=workload.build,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch=lambda rank, step: gratings(32, 1_000 * step + rank),
        held_out=lambda: [gratings(512, 10_000_000 + i) for i in range(4)],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    )


TASKS: dict[str, Callable[[], Task]] = {"gpt": gpt_task, "conv": conv_task}


def nudged(task: Task) -> Task:
    """Return the same from other weights, which tells what differences between losses mean."""

    def build() -> nn.Module:
        module = task.build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in module.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(NUDGE * weight.abs().mean() * noise)
        return module

    return replace(task, build=build)


@dataclass(frozen=True)
class Curve:
    """A training: (step, mean training loss since the last point), and the loss in the end.

    Attributes:
        sent: bytes that rank 0 has sent.
    """

    points: Sequence[tuple[int, float]]
    final: float
    sent: int = 0

    def excess(self, reference: Curve) -> float:
        """Return how far the loss is above that of the reference, relative to it."""
        return self.final / reference.final - 1


def train(task: Task, options: Mapping[str, Any], steps: int, group: Group) -> Curve:
    """Train a model on this rank, together with the others.

    Args:
        options: arguments of FastDDP.
    """
    module = task.build().to(group.device)
    model = FastDDP(module, bucket_cap_mb=BUCKET_MIB, **options)
    optimizer = task.optimizer(module)
    rate = partial(rate_share, steps=steps, warmup=min(WARMUP_STEPS, steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    every = max(1, steps // POINTS)
    points, since = [], torch.zeros(())
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(group.rank, step))
        loss.backward()
        optimizer.step()
        schedule.step()
        since += loss.detach().cpu()
        if (step + 1) % every == 0:
            points.append((step + 1, group.mean(since) / every))
            since = torch.zeros(())
    model.end_round()
    stats = model.sync_stats()
    module.eval()
    with torch.no_grad():
        held_out = torch.stack([task.loss(module, batch) for batch in task.held_out()]).mean()
    return Curve(points, group.mean(held_out), stats.sent_bytes + stats.round_bytes)


def recommended(name: str, steps: int) -> Wire | None:
    """Return the wire that docs/tuning.md advises for `steps` steps; None: the name alone."""
    if name == "topk":
        return Wire(TopK(0.1), warmup_steps=steps // 2)
    return None


def check(found: Mapping[str, Mapping[str, Curve]]) -> None:
    """Whether every training reached the loss of fp32.

    Raises:
        CheckFailed: one did not; names all of those.
    """
    behind = [
        f"{task} in {name}: {100 * curve.excess(curves[REFERENCE]):+.2f} %"
        for task, curves in found.items()
        for name, curve in curves.items()
        if name != NUDGED and name + CHOSEN not in curves  # judged as it is recommended
        if not curve.excess(curves[REFERENCE]) <= TOLERANCE
    ]
    if behind:
        raise CheckFailed(f"losses more than {TOLERANCE:.0%} above fp32: {'; '.join(behind)}")


def trainings(
    tasks: Mapping[str, Task], wires: Mapping[str, Any], steps: int, group: Group
) -> dict[str, dict[str, Curve]]:
    """Return the curves by task and by name of a wire; that of NUDGED begins with other weights."""
    found: dict[str, dict[str, Curve]] = {}
    for label, task in tasks.items():
        for name, wire in wires.items():
            chosen = nudged(task) if name == NUDGED else task
            curve = train(chosen, {"wire": wire}, steps, group)
            found.setdefault(label, {})[name] = curve
            if group.is_main:
                print(f"{label} in {name}: loss {curve.final:.4f} after {steps} steps", flush=True)
    return found


@b.benchmark(
    argument("--wires", "to train in", "all", type=b.names("wire", wire_formats())),
    argument("--tasks", "to learn", "all", type=b.names("task", TASKS)),
    argument("--steps", "of every training; far fewer say little", STEPS, type=whole),
    b.RANKS,
)
def main(args: argparse.Namespace, group: Group) -> Iterator[b.Shown]:
    """Return the final losses, how far they are from those of fp32, and the curves."""
    wires: dict[str, str | Wire] = {REFERENCE: REFERENCE, NUDGED: REFERENCE}
    for name in args.wires:
        wires[name] = name
        if advised := recommended(name, args.steps):
            wires[name + CHOSEN] = advised
    tasks = {name: TASKS[name]() for name in args.tasks}
    found = trainings(tasks, wires, args.steps, group)
    rows = []
    for name in wires:
        cells = [f"`{name}`"]
        for curves in found.values():
            above = curves[name].excess(curves[REFERENCE])
            cells += [f"{curves[name].final:.4f}", f"{above:+.2%}"]
        rows.append(cells)
    headers = ["wire", *(head for task in found for head in (f"{task}: loss", "against fp32"))]
    lines = {
        task: {name: list(curve.points) for name, curve in curves.items()}
        for task, curves in found.items()
    }
    title = f"loss of held-out data at the end of training on {group.world} ranks"
    yield b.table(title, headers, rows, lines=lines)
    check(found)
