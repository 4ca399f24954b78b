"""What synchronisation costs the host as models and worlds grow: planning, wrapping, stepping.

    python -m bench.scale --parameters 10,100,1000,10000 --worlds 2,64,4096 --json out/scale.json

Parameters of 16 elements each, whose gradients are made beforehand: no layer computes, and a step
is hooks, buckets and collectives. First in one process, on fake process groups of any size, whose
collectives do nothing: the time of a plan, of wrapping a module (what is compiled or loaded once is
left out) and of a backward. torch's DDP cannot run a backward on a fake group. Then on two real
ranks over loopback, beside torch's DDP. From each backward that of the bare module in the same
round is subtracted.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench import cli, jobs, points
from bench.bare import BareList
from bench.errors import UsageError
from bench.harness import Progress
from bench.launch import Group, is_rank
from bench.machine import describe, environment
from bench.wrappers import FLOOR, VARIANTS

KIND = "scale"
NUMEL = 16
CPU = torch.device("cpu")
REAL = ("ddp", "ddp_batched_view", "fastsync")
PLAN, WRAP, BACKWARD = "plan", "wrap", "backward"
WARMUP = 4


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks, of which this process is the first and the others are not.

    torch keeps it for tests of its own; collectives on it return at once.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def plan_seconds(module: nn.Module, world: int, rounds: int) -> list[float]:
    """Seconds of making a plan for the module's parameters."""
    from fastsync.plan.buckets import ParamSpec, make_plan
    from fastsync.plan.policy import BucketPolicy, SyncPolicy

    specs = [ParamSpec.of(i, p) for i, p in enumerate(module.parameters())]
    order = list(range(len(specs)))
    arguments = (specs, order, BucketPolicy.from_mb(None), SyncPolicy(), world)
    return [_seconds(lambda: make_plan(*arguments)) for _ in range(rounds)]


def backward_seconds(module: BareList, model: nn.Module) -> float:
    """Seconds of one backward that hands a gradient to every parameter."""
    model.zero_grad(set_to_none=True)
    module.ready += [torch.ones_like(p) for p in module.list]
    loss = model()
    return _seconds(loss.backward)


def _in_turn(
    pairs: dict[str, tuple[BareList, nn.Module]], rounds: int, before: Callable[[], object]
) -> dict[str, list[float]]:
    for module, model in pairs.values():
        for _ in range(WARMUP):  # plans settle
            backward_seconds(module, model)
    found: dict[str, list[float]] = {name: [] for name in pairs}
    names = list(pairs)
    for index in range(rounds):
        for place in range(len(names)):
            name = names[(index + place) % len(names)]
            before()
            found[name].append(backward_seconds(*pairs[name]))
    return found


def _less(times: list[float], floor: list[float]) -> list[float]:
    return [a - b for a, b in zip(times, floor, strict=True)]


def on_fake(world: int, count: int, rounds: int) -> list[points.Point]:
    """Plan, wrap and backward on a fake group."""
    name = ("fake group", f"{world} ranks")
    with fake_group(world):
        bare = BareList([NUMEL] * count, CPU)
        wraps, module = [], bare
        for _ in range(3):
            module = BareList([NUMEL] * count, CPU)
            start = time.perf_counter()
            model = VARIANTS["fastsync"].wrap(module, CPU)
            wraps.append(time.perf_counter() - start)
        times = _in_turn({FLOOR: (bare, bare), "fastsync": (module, model)}, rounds, gc.collect)
        plans = plan_seconds(module, world, rounds)
        del model
    size = f"{count} parameters"
    return [
        points.point((*name, PLAN, size), plans),
        points.point((*name, WRAP, size), wraps),
        points.point((*name, BACKWARD, size), _less(times["fastsync"], times[FLOOR])),
    ]


def on_ranks(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """The backward on real ranks, FastDDP's beside torch's."""
    found = []
    progress = Progress(group)
    for count in numbers(args.parameters):
        progress.show(f"{group.world} ranks: {count} parameters")
        bare = BareList([NUMEL] * count, group.device)
        pairs: dict[str, tuple[BareList, nn.Module]] = {FLOOR: (bare, bare)}
        for name in REAL:
            if VARIANTS[name].unavailable() is None:
                module = BareList([NUMEL] * count, group.device)
                pairs[name] = (module, VARIANTS[name].wrap(module, group.device))
        times = _in_turn(pairs, args.rounds, dist.barrier)
        slowest = group.max(torch.tensor(list(times.values()), dtype=torch.float64)).tolist()
        by_name = dict(zip(times, slowest, strict=True))
        for name in pairs:
            if name != FLOOR:
                of = ("loopback", f"{group.world} ranks", name, f"{count} parameters")
                found.append(points.point(of, _less(by_name[name], by_name[FLOOR])))
    progress.clear()
    if group.is_main:
        print(f"\nbackward, ms, {group.world} ranks\n{table(found, args.markdown)}", flush=True)
        report({"environment": environment(group), "points": found})
    return 0


def table(found: Sequence[points.Point], markdown: bool = False) -> str:
    """Milliseconds: a row per quantity or variant, a column per number of parameters."""
    return points.pivot(found, "ms", (2, 3), points.milliseconds, markdown)


def numbers(text: str) -> list[int]:
    """Parses positive whole numbers.

    Raises:
        UsageError: there is something else in the list.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expects whole numbers such as 10,1000 but got {text!r}") from None
    if min(found) < 1:
        raise UsageError(f"expects positive numbers but got {text!r}")
    return found


def _fake_part(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    group = Group(0, 1, CPU)
    progress = Progress(group)
    facts, found = environment(group), []
    print(describe(facts), flush=True)
    on_fake(2, 10, 1)  # loads the extension
    for world in numbers(args.worlds):
        added = []
        for count in numbers(args.parameters):
            progress.show(f"fake group of {world}: {count} parameters")
            added += on_fake(world, count, args.rounds)
        progress.clear()
        print(f"\nfake group of {world} ranks\n{table(added, args.markdown)}", flush=True)
        found += added
    return {"environment": facts, "points": found}


def _start(args: argparse.Namespace) -> int:
    numbers(args.worlds)
    numbers(args.parameters)
    worlds = jobs.worlds(args.ranks, least=2)
    first = [] if is_rank() else [_fake_part(args)]
    save = points.saved(KIND, args)
    return jobs.run_jobs(
        lambda *context: on_ranks(args, *context),
        [jobs.Job(world) for world in worlds],
        args.threads,
        lambda parts: save([*first, *parts]),
    )


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = points.parser(KIND, __doc__)
    add = parser.add_argument
    add("--parameters", default="10,100,1000,10000", help="default: %(default)s")
    add("--worlds", default="2,64,1024,4096", help="of fake groups (default: %(default)s)")
    add("--ranks", default="2", help="of real groups (default: 2)")
    add("--rounds", type=int, default=7, help="turns of every way (default: %(default)s)")
    points.add_arguments(parser)
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: _start(args))


if __name__ == "__main__":
    raise SystemExit(main())
