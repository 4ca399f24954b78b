"""Whether models learn as well in every wire format as in fp32: losses of whole trainings.

    python -m bench.curves --json bench/results/curves.json

A byte-level GPT and a residual conv net are trained from the same weights on the same data, once in
each format, with error feedback as the format recommends. The loss that counts is that of held-out
data after the last step. Exit code 1 where it is more than 1 % above that of fp32. For
scale, fp32 runs once more from weights that were nudged by 1e-4 of their size.

Top-k and PowerSGD are judged as docs/tuning.md recommends them, more of the gradient and the first
steps in fp32. What they reach when nothing is chosen is shown beside it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench import cli
from bench.errors import CheckFailed, UsageError
from bench.launch import Group, launch
from bench.machine import command_line, environment
from bench.models import WORKLOADS
from bench.record import TABLE, add_json_argument, write_json
from bench.tables import render
from examples import data, gpt
from fastsync import FastDDP, PowerSGD, TopK, Wire
from fastsync.wire.formats import wire_formats

REFERENCE = "fp32"
NUDGED = "fp32, nudged"
NUDGE = 1e-4
CHOSEN = ", recommended"
TOLERANCE = 0.01
POINTS = 24  # of a curve
WARMUP_STEPS = 20
CLASSES = 10
SIDE = 32
WAVES = 4.0
NOISE = 1.0
MISLABELLED = 0.3  # keeps the loss above 0, where shares of it mean something
BUCKET_MIB = 0.5  # several buckets also in a small model


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes:
        loss: of a model and a batch.
        batch: for a rank and a step.
        held_out: batches that nobody trains on.
        steps: optimizer steps by default.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]
    held_out: Callable[[], Sequence[Any]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int


def gpt_task() -> Task:
    """The GPT of examples/ in small: the standard library's own text, byte by byte."""
    corpus = data.load()
    shape = gpt.Shape(width=64, layers=2)
    return Task(
        build=lambda: gpt.build(shape=shape),
        loss=lambda model, windows: model(windows),
        batch=lambda rank, step: corpus.batch(rank, step, 16, shape.length),
        held_out=lambda: corpus.validation_batch(512, shape.length).split(64),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)),
        steps=400,
    )


def gratings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of waves, in as many directions as there are classes, under noise.

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
    """The conv net of bench/models in small: the direction of noisy waves."""
    workload = WORKLOADS["conv"](scale=1 / 64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(
        build=workload.build,
        loss=loss,
        batch=lambda rank, step: gratings(32, 1_000 * step + rank),
        held_out=lambda: [gratings(512, 10_000_000 + i) for i in range(4)],
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        steps=400,
    )


TASKS: dict[str, Callable[[], Task]] = {"gpt": gpt_task, "conv": conv_task}


def nudged(task: Task) -> Task:
    """The same from other weights, which tells what differences between losses mean."""

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
    """A training: (step, mean training loss since the last point), and the loss in the end."""

    points: Sequence[tuple[int, float]]
    final: float


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 0: a share of the peak."""
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, steps))
    return warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(task: Task, wire: Any, steps: int, group: Group) -> Curve:
    """Trains a model on this rank, together with the others."""
    module = task.build().to(group.device)
    model = FastDDP(module, wire=wire, bucket_cap_mb=BUCKET_MIB)
    optimizer = task.optimizer(module)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
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
            points.append((step + 1, mean_over_ranks(since, group) / every))
            since = torch.zeros(())
    return Curve(points, evaluate(module, task, group))


@torch.no_grad()
def evaluate(module: nn.Module, task: Task, group: Group) -> float:
    """The mean loss of held-out batches."""
    module.eval()
    losses = [task.loss(module, batch) for batch in task.held_out()]
    return mean_over_ranks(torch.stack(losses).mean(), group)


def mean_over_ranks(value: Tensor, group: Group) -> float:
    total = value.detach().to(group.device).clone()
    dist.all_reduce(total)
    return total.item() / group.world


def excess(curve: Curve, reference: Curve) -> float:
    """How far the loss is above that of the reference, relative to it."""
    return curve.final / reference.final - 1


def recommended(name: str, steps: int) -> Wire | None:
    """What docs/tuning.md advises for a training of `steps`; None: the name alone."""
    if name == "topk":
        return Wire(TopK(0.1), warmup_steps=steps // 2)
    if name == "powersgd":
        return Wire(PowerSGD(16), warmup_steps=steps // 10)
    return None


def is_judged(name: str, names: Container[str]) -> bool:
    return name != NUDGED and name + CHOSEN not in names


def check(found: Mapping[str, Mapping[str, Curve]]) -> None:
    """Whether every training reached the loss of fp32.

    Raises:
        CheckFailed: one did not; names all of those.
    """
    behind = [
        f"{task} in {name}: {100 * excess(curve, curves[REFERENCE]):+.2f} %"
        for task, curves in found.items()
        for name, curve in curves.items()
        if is_judged(name, curves) and not excess(curve, curves[REFERENCE]) <= TOLERANCE
    ]
    if behind:
        raise CheckFailed(f"losses more than {TOLERANCE:.0%} above fp32: {'; '.join(behind)}")


def trainings(
    tasks: Mapping[str, Task], wires: Mapping[str, Any], steps: int | None, group: Group
) -> dict[str, dict[str, Curve]]:
    """Curves by task and wire, with progress on rank 0; NUDGED stands for itself."""
    found: dict[str, dict[str, Curve]] = {}
    for label, task in tasks.items():
        count = steps or task.steps
        for name, wire in wires.items():
            start = nudged(task) if name == NUDGED else task
            advised = recommended(name.removesuffix(CHOSEN), count)
            curve = train(start, advised if name.endswith(CHOSEN) else wire, count, group)
            found.setdefault(label, {})[name] = curve
            if group.is_main:
                print(f"{label} in {name}: loss {curve.final:.4f} after {count} steps", flush=True)
    return found


def table(found: Mapping[str, Mapping[str, Curve]]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: the final loss, and how far it is from that of fp32."""
    headers = ["wire"]
    for task in found:
        headers += [f"{task}: loss", "against fp32"]
    names = next(iter(found.values())).keys()
    rows = []
    for name in names:
        row = [f"`{name}`"]
        for curves in found.values():
            row += [f"{curves[name].final:.4f}", f"{excess(curves[name], curves[REFERENCE]):+.2%}"]
        rows.append(row)
    return headers, rows


def run(args: argparse.Namespace, group: Group) -> int:
    names = list(dict.fromkeys([REFERENCE, *args.wires.split(",")]))
    unknown = sorted(set(names) - set(wire_formats())) + sorted(
        set(args.tasks.split(",")) - set(TASKS)
    )
    if unknown:
        raise UsageError(
            f"unknown {unknown}; expects wires of {', '.join(wire_formats())} and tasks of "
            f"{', '.join(TASKS)}"
        )
    tasks = {name: TASKS[name]() for name in args.tasks.split(",")}
    wires = {REFERENCE: REFERENCE, NUDGED: REFERENCE}
    for name in names:
        wires[name] = name
        if recommended(name, 1):
            wires[name + CHOSEN] = name
    found = trainings(tasks, wires, args.steps, group)
    if group.is_main:
        headers, rows = table(found)
        print(render(headers, rows))
        if args.json:
            write_json(result(headers, rows, found, group), args.json)
    check(found)
    return 0


def result(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    found: Mapping[str, Mapping[str, Curve]],
    group: Group,
) -> dict[str, Any]:
    """What bench.report reads."""
    lines = {
        task: {name: list(curve.points) for name, curve in curves.items()}
        for task, curves in found.items()
    }
    return {
        "kind": TABLE,
        "command": command_line(),
        "environment": environment(group),
        "title": f"loss of held-out data at the end of training on {group.world} ranks",
        "headers": list(headers),
        "rows": [list(row) for row in rows],
        "lines": lines,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = ",".join(wire_formats())
    parser.add_argument("--wires", default=every, help=f"of {every} (default: all)")
    parser.add_argument(
        "--tasks", default=",".join(TASKS), help=f"of {','.join(TASKS)} (default: all)"
    )
    parser.add_argument("--steps", type=int, help="of every training (default: 400)")
    parser.add_argument(
        "--quick", action="store_true", help="60 steps: to see it run; losses say little"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start; torchrun's wins (default: 2)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)"
    )
    add_json_argument(parser)
    args = parser.parse_args()
    if args.quick and args.steps is None:
        args.steps = 60
    return cli.guarded(lambda: launch(lambda group: run(args, group), args.ranks, args.threads))


if __name__ == "__main__":
    raise SystemExit(main())
