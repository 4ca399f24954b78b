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
steps are timed in turn. Exits with 1 where weights differ. What happens after backward hangs on a
callback of autograd, as in DDP, so that a training loop is the same under every strategy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.common.costs import collectives
from examples.common.ranks import Group, argument, run_example, whole
from examples.common.rounds import Settings, measure, table
from examples.common.training import Workload, make_lane
from examples.common.variants import BASELINE, FLOOR, OURS, VARIANTS, Variant, ddp, fast_ddp

WIDTH, LAYERS, BATCH = 256, 24, 32
BUCKET_MB = 1.0
CHECK_STEPS, WARMUP_STEPS = 6, 3


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for linear in linears:  # with torch's default, gradients of the first layers would vanish
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    layers = [nn.Sequential(linear, nn.ReLU()) for linear in linears]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def workload(group: Group) -> Workload:
    """Other weights and other data on every rank."""

    def batch(rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1_000 * rank + step)
        return torch.randn(BATCH, WIDTH, generator=generator)

    return Workload("layers", lambda: build(group.rank), batch, lambda out: out.square().mean())


def broadcast_weights(module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)


def average_each(params: Sequence[nn.Parameter]) -> None:
    """Average by one all-reduce per gradient, each waited for before the next begins."""
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
        """Flatten, divide and send; return while the collective is in flight."""
        self.flat = torch.cat([_gradient(p).flatten() for p in self.params])
        self.flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Wait, and copy the averages back."""
        self.work.wait()
        parts = self.flat.split([p.numel() for p in self.params])
        for param, part in zip(self.params, parts, strict=True):
            _gradient(param).copy_(part.view_as(param))
        self.missing = len(self.params)


def _gradient(param: nn.Parameter) -> Tensor:
    """Return the gradient, which every parameter of this model has after backward."""
    assert param.grad is not None
    return param.grad


def make_buckets(params: Iterable[nn.Parameter], cap_mb: float) -> list[Bucket]:
    """Return buckets of at least `cap_mb` MiB, last layers first: the order of backward."""
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


class ByHand(nn.Module):
    """Starts with rank 0's weights, and calls `finish` at the end of each backward."""

    def __init__(self, module: nn.Module, finish: Callable[[], None]) -> None:
        super().__init__()
        self.module, self.finish = module, finish
        broadcast_weights(module)

    def forward(self, *inputs: Tensor) -> Any:
        output = self.module(*inputs)
        output.register_hook(self._backward_begins)
        return output

    def _backward_begins(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)


def by_hand(name: str, averager: Callable[[nn.Module], Callable[[], None]]) -> Variant:
    """Return a strategy made of what has to be done after backward."""
    return Variant(name, lambda module, device: ByHand(module, averager(module)))


def _buckets_of(module: nn.Module) -> list[Bucket]:
    return make_buckets(module.parameters(), BUCKET_MB)


STRATEGIES = (
    VARIANTS[FLOOR],
    by_hand("per parameter", lambda module: partial(average_each, list(module.parameters()))),
    by_hand("bucketed", lambda module: partial(average_buckets, _buckets_of(module))),
    by_hand("overlapped", lambda module: Overlap(_buckets_of(module)).finish),
    Variant(BASELINE, ddp(bucket_cap_mb=BUCKET_MB)),
    Variant(OURS, fast_ddp(bucket_cap_mb=BUCKET_MB)),
)


def all_reduces(strategy: Variant, group: Group) -> int:
    """All-reduces of a step, once plans have settled; it needs no other collective."""
    lane = make_lane(workload(group), strategy, group, "sgd")
    lane.steps(WARMUP_STEPS)
    return collectives(lane)


def run(args: argparse.Namespace, group: Group) -> int:
    settings = Settings(args.rounds, args.steps, WARMUP_STEPS, CHECK_STEPS)
    timings = measure(workload(group), STRATEGIES, group, settings)
    counts = [str(all_reduces(strategy, group)) for strategy in STRATEGIES]
    if group.is_main:
        sizes = [p.nbytes for p in build(0).parameters()]
        print(f"\n  {len(sizes)} parameters, {sum(sizes) / 1e6:.1f} MB of gradients, {group.world}")
        print(f"  ranks over {group.transport}, buckets of {BUCKET_MB:g} MiB\n")
        print(table(timings, {"all-reduces": counts}))
        print(f"\n  exposed: step less that of `{FLOOR}` in the same round; ±: half the range")
        print("  between the quartiles of the rounds; all-reduces: per step, by torch's profiler")
    return 0


if __name__ == "__main__":
    rounds = argument("--rounds", "how often each is timed", 12, type=whole)
    steps = argument("--steps", "steps per round", 5, type=whole)
    raise SystemExit(run_example("manual_parallel", __doc__, run, rounds, steps))
