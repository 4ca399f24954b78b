"""Shows one step of gradient synchronisation: buckets, and messages of five strategies.

    python -m examples.visualise --ranks 2

Every rank computes its own gradients; five strategies average them: one message per parameter,
buckets after backward, buckets that overlap with backward (all three as examples/manual_parallel.py
writes them out), torch's DDP and fastsync's FastDDP, watched through their communication hooks. The
terminal shows FastDDP's buckets, and when each message was under way, as rank 0's host saw it.
Exits with 1 where a strategy does not send every gradient once; examples/manual_parallel.py checks
the averages, and measures.
"""

# No `from __future__ import annotations`: a hook's annotations must be types, not their names.

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from examples.common.ranks import CheckFailed, Group, run_example
from examples.common.text import render
from examples.manual_parallel import BUCKET_MB, STRATEGIES, build, workload

SHOWN = ("per parameter", "bucketed", "overlapped", "ddp", "fastsync")
WARMUP_STEPS = 3
CALLBACK_SECONDS = 5.0
WIDTH = 64
MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass
class Message:
    """One collective: the parameters whose gradients it carries, where a hook tells them, their
    bytes, and when it was under way, in seconds since backward began."""

    names: tuple[str, ...]
    size: int
    start: float
    end: float | None = None


@dataclass(frozen=True)
class Run:
    """One step under one strategy, seen by rank 0.

    Attributes:
        backward, total: seconds until backward had produced its last gradient, and until all
            gradients were averages.
    """

    strategy: str
    messages: tuple[Message, ...]
    backward: float
    total: float

    def lanes(self, longest: float) -> tuple[str, str]:
        """Backward, and below it each message by its number, on a common scale of time."""

        def place(seconds: float) -> int:
            return min(WIDTH - 1, int(seconds / longest * WIDTH))

        messages = [" "] * WIDTH
        for number, message in enumerate(self.messages):
            for at in range(place(message.start), place(message.end or longest) + 1):
                messages[at] = MARKS[number % len(MARKS)]
        return "=" * (place(self.backward) + 1), "".join(messages).rstrip()


class Recorder:
    """Notes messages and a module's last gradient, in seconds since `begin`."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.send = dist.all_reduce
        self.begin()
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.gradient)

    def begin(self) -> None:
        self.messages: list[Message] = []
        self.aboard: tuple[str, ...] = ()
        self.started = time.perf_counter()
        self.backward = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.started

    def gradient(self, _: Tensor) -> None:
        self.backward = self.now()

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Any:
        """Stands in for that of torch.distributed."""
        message = Message(self.aboard, tensor.nbytes, self.now())
        self.messages.append(message)
        work = self.send(tensor, async_op=True)
        work.get_future().add_done_callback(lambda _: setattr(message, "end", self.now()))
        return work if async_op else work.wait()

    def taken(self) -> tuple[Message, ...]:
        """The messages in the order in which they were sent; RuntimeError where one is missing."""
        deadline = time.monotonic() + CALLBACK_SECONDS
        # The backend's thread notes an arrival right after it has woken the waiting rank.
        while any(message.end is None for message in self.messages):
            if time.monotonic() > deadline:
                raise RuntimeError("a message was sent but not received")
            time.sleep(1e-4)
        return tuple(self.messages)


def watching_hook(
    recorder: Recorder,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """What DDP does without a hook; says who travels in the bucket."""
    recorder.aboard = tuple(recorder.names[id(p)] for p in bucket.parameters())
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    first: Callable[[Any], Tensor] = lambda done: done.value()[0]  # noqa: E731
    future: torch.futures.Future[Tensor] = work.get_future().then(first)
    return future


def wrapped(strategy: str, module: nn.Module, recorder: Recorder) -> nn.Module:
    """The module under one strategy, in sight of a recorder."""
    wrapper = {"ddp": DistributedDataParallel, "fastsync": fastsync.FastDDP}.get(strategy)
    if wrapper is None:
        by_hand = next(s for s in STRATEGIES if s.name == strategy)
        return by_hand.wrap(module, next(module.parameters()).device)
    model = wrapper(module, bucket_cap_mb=BUCKET_MB)
    model.register_comm_hook(recorder, watching_hook)
    return model


def made(group: Group) -> tuple[nn.Module, Tensor]:
    """The model of manual_parallel with rank 0's weights, and this rank's batch."""
    inputs = workload(group).batch(group.rank, 0)
    return build(0).to(group.device), inputs.to(group.device)


def observe(strategy: str, group: Group) -> Run:
    """Collective. One step after WARMUP_STEPS.

    Raises:
        CheckFailed: the messages are not as large as all gradients.
    """
    module, inputs = made(group)
    recorder = Recorder(module)
    model = wrapped(strategy, module, recorder)
    for _ in range(1 + WARMUP_STEPS):
        module.zero_grad()
        loss = model(inputs).square().mean()
        group.synchronize()
        dist.barrier()
        recorder.begin()
        with mock.patch.object(dist, "all_reduce", recorder.all_reduce):
            loss.backward()
        group.synchronize()
        total = recorder.now()
        messages = recorder.taken()
    sent, size = sum(m.size for m in messages), sum(p.nbytes for p in module.parameters())
    if not group.all_agree(sent == size):
        raise CheckFailed(f"{strategy} sent {sent} bytes of {size} bytes of gradients")
    return Run(strategy, messages, recorder.backward, total)


def show(runs: Sequence[Run], group: Group) -> None:
    print("\n  the buckets of FastDDP\n")
    numbered = enumerate(runs[-1].messages)
    rows = [(str(i), f"{m.size / 1e6:.2f}", " ".join(m.names)) for i, m in numbered]
    print(render(("bucket", "MB", "parameters"), rows))
    print("\n  one backward (=) and its messages, by number\n")
    longest = max(run.total for run in runs)
    for run in runs:
        backward, messages = run.lanes(longest)
        print(f"  {run.strategy:<14}|{backward}\n  {'':<14}|{messages}")
    scale = f"{1e3 * longest:.1f} ms".rjust(WIDTH - 1)
    print(f"  {'':<14}+{'-' * WIDTH}\n  {'':<14}0{scale}\n")
    print(f"  {group.world} ranks over {group.transport}; a single step, so times are a look,")
    print("  not a measurement")


def run(args: argparse.Namespace, group: Group) -> int:
    runs = [observe(name, group) for name in SHOWN]
    if group.is_main:
        show(runs, group)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_example("visualise", __doc__, run))
