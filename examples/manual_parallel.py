"""Data parallelism by hand, step by step towards DDP, and what each step saves.

  no_sync        every rank trains alone: the floor, and the proof that ranks drift apart
  per parameter  after backward, one blocking all-reduce per gradient
  bucketed       after backward, gradients flattened into buckets, one all-reduce each
  overlapped     the same buckets, each sent by hooks as soon as backward has filled it
  ddp            torch's DistributedDataParallel
  fastsync       fastsync's FastDDP

    python -m examples.manual_parallel --ranks 2

Every rank builds other weights, which are then broadcast from rank 0. All strategies but `no_sync`
must train the same weights: the same bits on two ranks, up to the order of sums on more. Then their
steps are timed in turn. Exits with 1 where weights differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import fastsync
from examples.common.costs import events_of
from examples.common.ranks import Group, argument, run_example, whole
from examples.common.rounds import Settings, summarise, time_lanes
from examples.common.text import Progress, milliseconds, render
from examples.common.training import Lane, Workload, make_batches
from examples.common.variants import BASELINE, FLOOR, OURS

WIDTH, LAYERS, BATCH = 256, 24, 32
BUCKET_MB = 1.0
CHECK_STEPS = 6


@dataclass(frozen=True)
class Replica:
    """A rank's model under one strategy: the bare module, whose weights are trained, what is called
    in training, and what to call after each backward, from when on gradients are averages."""

    module: nn.Module
    model: nn.Module
    finish: Callable[[], None]


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1 + rank))


LAYERED = Workload("layers", lambda: build(0), _batch, lambda output: output.square().mean())


def broadcast_weights(module: nn.Module) -> None:
    """Gives every rank rank 0's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)


def average_each(params: Sequence[nn.Parameter]) -> None:
    """One all-reduce per gradient, each waited for before the next begins."""
    for param in params:
        assert param.grad is not None
        param.grad.div_(dist.get_world_size())
        dist.all_reduce(param.grad)


class Bucket:
    """Parameters whose gradients travel in one all-reduce."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.missing = len(self.params)

    def launch(self) -> None:
        """Flattens, divides and sends; returns while the collective is under way."""
        self.flat = torch.cat([_gradient(p).flatten() for p in self.params])
        self.flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Waits, and copies the averages back."""
        self.work.wait()
        parts = self.flat.split([p.numel() for p in self.params])
        for param, part in zip(self.params, parts, strict=True):
            _gradient(param).copy_(part.view_as(param))
        self.missing = len(self.params)


def _gradient(param: nn.Parameter) -> Tensor:
    """The gradient, which every parameter of this model has after backward."""
    assert param.grad is not None
    return param.grad


def make_buckets(params: Iterable[nn.Parameter], cap_mb: float) -> list[Bucket]:
    """Buckets of at least `cap_mb` MiB, last layers first: the order of backward."""
    buckets, group, size = [], [], 0
    for param in reversed(list(params)):
        group.append(param)
        size += param.numel() * param.element_size()
        if size >= cap_mb * 2**20:
            buckets.append(Bucket(group))
            group, size = [], 0
    return [*buckets, Bucket(group)] if group else buckets


def average_buckets(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.launch()
    for bucket in buckets:
        bucket.finish()


class Overlap:
    """Sends each bucket as soon as backward has produced its last gradient."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.sent = 0
        for bucket in buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def _arrived(self, bucket: Bucket, param: Tensor) -> None:
        bucket.missing -= 1
        # In order, whichever is complete: all ranks must issue the same collectives in one order.
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:
            self.buckets[self.sent].launch()
            self.sent += 1

    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.finish()
        self.sent = 0


def by_hand(averager: Callable[[nn.Module], Callable[[], None]]) -> Callable[[nn.Module], Replica]:
    def make(module: nn.Module) -> Replica:
        broadcast_weights(module)
        return Replica(module, module, averager(module))

    return make


def wrapped(wrapper: type[DistributedDataParallel]) -> Callable[[nn.Module], Replica]:
    return lambda module: Replica(module, wrapper(module, bucket_cap_mb=BUCKET_MB), lambda: None)


def _buckets_of(module: nn.Module) -> list[Bucket]:
    return make_buckets(module.parameters(), BUCKET_MB)


STRATEGIES: dict[str, Callable[[nn.Module], Replica]] = {
    FLOOR: by_hand(lambda module: lambda: None),
    "per parameter": by_hand(lambda module: partial(average_each, list(module.parameters()))),
    "bucketed": by_hand(lambda module: partial(average_buckets, _buckets_of(module))),
    "overlapped": by_hand(lambda module: Overlap(_buckets_of(module)).finish),
    BASELINE: wrapped(DistributedDataParallel),
    OURS: wrapped(fastsync.FastDDP),
}


@dataclass
class ByHand(Lane):
    """A strategy in training."""

    finish: Callable[[], None] = lambda: None

    def step(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        self.finish()
        self.optimizer.step()
        return loss

    def weights(self) -> Tensor:
        return parameters_to_vector(self.module.parameters()).detach()


def make_lane(strategy: str, group: Group) -> ByHand:
    """Ranks draw different data, and all strategies the same."""
    module = build(seed=group.rank).to(group.device)  # other weights on every rank
    replica = STRATEGIES[strategy](module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    batches = make_batches(LAYERED, group, 1)
    model, finish = replica.model, replica.finish
    return ByHand(LAYERED, module, model, optimizer, batches, update=True, finish=finish)


@dataclass(frozen=True)
class Verdict:
    """What training with a strategy gave: whether all ranks hold the same weights, how far those
    are from DDP's relative to the way that training moved them, and the all-reduces of a step."""

    alike: bool
    distance: float
    collectives: int

    def good(self, world: int) -> bool:
        """Two ranks leave no room for the order of a sum."""
        return self.alike and self.distance <= (0.0 if world <= 2 else 1e-4)

    def words(self, world: int) -> str:
        if not self.alike:
            return "differ between ranks"
        if self.distance == 0:
            return "DDP's bits"
        return f"{self.distance:.0e} off DDP's" if self.good(world) else "NOT DDP'S"


def trained(strategy: str, group: Group) -> tuple[Tensor, Tensor, int]:
    """Weights before and after training, and the all-reduces of one more step."""
    lane = make_lane(strategy, group)
    start = lane.weights()
    for _ in range(CHECK_STEPS):
        lane.step()
    end = lane.weights()
    return start, end, events_of(lane.step).count("c10d::allreduce_")


def check(group: Group, progress: Progress) -> dict[str, Verdict]:
    """Trains with every strategy and compares the weights with DDP's and between the ranks."""
    start, expected, _ = trained(BASELINE, group)
    moved = (expected - start).norm()
    verdicts = {}
    for strategy in STRATEGIES:
        progress.show(f"checking {strategy}")
        _, weights, collectives = trained(strategy, group)
        alike = group.alike(weights)
        distance = group.most(float((weights - expected).norm() / moved))
        verdicts[strategy] = Verdict(alike, distance, collectives)
    progress.clear()
    return verdicts


def run(args: argparse.Namespace, group: Group) -> int:
    progress = Progress(group)
    verdicts = check(group, progress)
    failed = [n for n, v in verdicts.items() if n != FLOOR and not v.good(group.world)]
    if verdicts[FLOOR].alike and group.world > 1:
        failed.append(f"{FLOOR} (ranks that do not synchronise must drift apart)")
    lanes: dict[str, Lane] = {name: make_lane(name, group) for name in STRATEGIES}
    measured = time_lanes(lanes, group, Settings(rounds=args.rounds, steps=args.steps))
    words = {name: verdict.words(group.world) for name, verdict in verdicts.items()}
    headers, rows = ("strategy", "all-reduces", "step ms", "±", "overhead ms", "±", "weights"), []
    for timing in summarise(measured, words, BASELINE):
        times = (*milliseconds(timing.step), *milliseconds(timing.exposed))
        sent = str(verdicts[timing.variant].collectives)
        rows.append((timing.variant, sent, *times, timing.check))
    if group.is_main:
        module = build(0)
        count, size = len(list(module.parameters())), sum(p.nbytes for p in module.parameters())
        print(f"\n  {count} parameters, {size / 1e6:.1f} MB of gradients, {group.world} ranks over")
        print(f"  {group.transport}, buckets of {BUCKET_MB:g} MiB\n")
        print(render(headers, rows))
        print(f"\n  overhead: step less that of `{FLOOR}` in the same round; ±: half the range")
        print("  between the quartiles of the rounds; all-reduces: per step, by torch's profiler")
        if failed:
            print(f"\n  weights are not what they should be: {', '.join(failed)}")
    return 1 if failed else 0


def main() -> int:
    return run_example(
        "manual_parallel",
        __doc__,
        run,
        argument("--rounds", "how often each is timed", 12, type=whole),
        argument("--steps", "steps per round", 5, type=whole),
    )


if __name__ == "__main__":
    raise SystemExit(main())
