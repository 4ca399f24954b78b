"""Observes one step of gradient synchronisation under several strategies.

Gradients are kept before and after averaging, and every message is noted with the parameters that
it carries and the time that it was under way. DDP and FastDDP are watched through their
communication hooks, so nothing but public interfaces is used.
"""

# No `from __future__ import annotations`: a hook's annotations must be types, not their names.

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from examples.common.ranks import Group
from examples.manual_parallel import Bucket, Overlap, Replica, broadcast_weights, make_buckets

BUCKET_MB = 0.5
CELLS = 48
WARMUP_STEPS = 3
BATCH = 64
CALLBACK_SECONDS = 5.0


@dataclass(frozen=True)
class Message:
    """One collective: the parameters whose gradients it carries, their bytes, and when it was under
    way, in seconds since backward began, on rank 0's host."""

    names: tuple[str, ...]
    size: int
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """One step under one strategy, seen by rank 0.

    Attributes:
        backward, total: seconds until backward had produced its last gradient, and until all
            gradients were averages.
        error: largest difference from the fp64 average on any rank, of the largest average.
    """

    strategy: str
    messages: tuple[Message, ...]
    backward: float
    total: float
    error: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that backward did not hide."""
        return self.total - self.backward

    def cells(self) -> tuple[str, ...]:
        """A row of the table whose headers are HEADERS."""
        size = sum(message.size for message in self.messages)
        times = (f"{1e3 * self.total:.2f}", f"{1e3 * self.exposed:.2f}")
        return (
            self.strategy,
            str(len(self.messages)),
            f"{size / 1e6:.2f}",
            *times,
            f"{self.error:.0e}",
        )


HEADERS = ("strategy", "messages", "MB", "step ms", "exposed ms", "error")


@dataclass(frozen=True)
class Parameter:
    """A parameter and CELLS elements of its gradient, evenly spaced: every rank's own before
    averaging, and what FastDDP left on every rank after it; `size` is in bytes."""

    name: str
    shape: tuple[int, ...]
    size: int
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Picture:
    """All that there is to show."""

    transport: str
    parameters: tuple[Parameter, ...]
    runs: tuple[Run, ...]

    @property
    def world(self) -> int:
        return len(self.parameters[0].before)

    def bucket_of(self, strategy: str) -> dict[str, int]:
        """The number of the message that carries each parameter."""
        messages = next(run.messages for run in self.runs if run.strategy == strategy)
        return {name: i for i, message in enumerate(messages) for name in message.names}


@dataclass
class Recorder:
    """Notes messages and the last gradient, in seconds since `begin`."""

    names: dict[int, str]
    started: float = 0.0
    backward: float = 0.0
    messages: dict[int, list[Any]] = field(default_factory=dict)

    def begin(self) -> None:
        self.messages.clear()
        self.started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.started

    def gradient(self, _: Tensor) -> None:
        self.backward = self.now()

    def sent(self, key: int, params: Iterable[Tensor], size: int) -> None:
        names = tuple(self.names[id(p)] for p in params)
        self.messages[key] = [names, size, self.now(), None]

    def received(self, key: int) -> None:
        self.messages[key][3] = self.now()

    def taken(self) -> tuple[Message, ...]:
        """The messages in the order in which they were sent; RuntimeError where one is missing."""
        deadline = time.monotonic() + CALLBACK_SECONDS
        # The backend's thread notes an arrival right after it has let the waiting rank go on.
        while any(message[3] is None for message in self.messages.values()):
            if time.monotonic() > deadline:
                raise RuntimeError("a message was sent but not received")
            time.sleep(1e-4)
        ordered = sorted(self.messages.values(), key=lambda message: message[2])
        return tuple(Message(*message) for message in ordered)


class WatchedBucket(Bucket):
    """A bucket of examples/manual_parallel.py that tells a recorder."""

    def __init__(self, params: Sequence[nn.Parameter], recorder: Recorder) -> None:
        super().__init__(params)
        self.recorder = recorder

    def launch(self) -> None:
        self.recorder.sent(id(self), self.params, sum(p.nbytes for p in self.params))
        super().launch()
        arrived: Callable[[Any], None] = lambda _: self.recorder.received(id(self))  # noqa: E731
        self.work.get_future().add_done_callback(arrived)


Make = Callable[[nn.Module, Recorder], Replica]


def _one_by_one(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.launch()
        bucket.finish()


def _by_hand(cap_mb: float, overlaps: bool) -> Make:
    def make(module: nn.Module, recorder: Recorder) -> Replica:
        broadcast_weights(module)
        plain = make_buckets(module.parameters(), cap_mb)
        buckets = [WatchedBucket(bucket.params, recorder) for bucket in plain]
        finish = Overlap(buckets).finish if overlaps else partial(_one_by_one, buckets)
        return Replica(module, module, finish)

    return make


def watching_hook(
    recorder: Recorder,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """What DDP does without a hook, and a note in the recorder."""
    key, flat = bucket.index(), bucket.buffer()
    recorder.sent(key, bucket.parameters(), flat.nbytes)
    work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)

    def arrived(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        recorder.received(key)
        return done.value()[0]

    future: torch.futures.Future[Tensor] = work.get_future().then(arrived)
    return future


def _hooked(wrapper: type[DistributedDataParallel]) -> Make:
    def make(module: nn.Module, recorder: Recorder) -> Replica:
        model = wrapper(module, bucket_cap_mb=BUCKET_MB)
        model.register_comm_hook(recorder, watching_hook)
        return Replica(module, model, lambda: None)

    return make


STRATEGIES: dict[str, Make] = {
    "per parameter": _by_hand(0.0, overlaps=False),
    "bucketed": _by_hand(BUCKET_MB, overlaps=False),
    "overlapped": _by_hand(BUCKET_MB, overlaps=True),
    "ddp": _hooked(DistributedDataParallel),
    "fastsync": _hooked(fastsync.FastDDP),
}


def build(group: Group) -> nn.Module:
    torch.manual_seed(0)
    sizes = ((256, 512), (512, 512), (512, 256))
    layers = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in sizes]
    return nn.Sequential(*layers, nn.Linear(256, 10)).to(group.device)


def batch(group: Group) -> Tensor:
    generator = torch.Generator().manual_seed(1 + group.rank)
    return torch.randn(BATCH, 256, generator=generator).to(group.device)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def observe(strategy: str, group: Group, expected: Tensor) -> tuple[Run, dict[str, Tensor]]:
    """One step after WARMUP_STEPS, and the gradients that it left on this rank.

    Args:
        expected: the fp64 averages of all parameters, flattened.
    """
    module, inputs = build(group), batch(group)
    recorder = Recorder({id(p): name for name, p in module.named_parameters()})
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(recorder.gradient)
    replica = STRATEGIES[strategy](module, recorder)
    for _ in range(1 + WARMUP_STEPS):
        module.zero_grad()
        loss = replica.model(inputs).square().mean()
        group.synchronize()
        dist.barrier()
        recorder.begin()
        loss.backward()
        replica.finish()
        group.synchronize()
        total = recorder.now()
        messages = recorder.taken()
    found = gradients(module)
    apart = (_flat(found) - expected).abs().max() / expected.abs().max()
    error = group.max(apart).item()
    return Run(strategy, messages, recorder.backward, total, error), found


def _flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grad.detach().double().flatten() for grad in grads.values()])


def _cells(grads: dict[str, Tensor]) -> dict[str, tuple[float, ...]]:
    picks = {name: torch.linspace(0, g.numel() - 1, CELLS).long() for name, g in grads.items()}
    return {name: tuple(g.flatten().cpu()[picks[name]].tolist()) for name, g in grads.items()}


def take_picture(group: Group) -> Picture:
    """Collective. The picture is the same on every rank but for rank 0's times."""
    alone = build(group)
    alone(batch(group)).square().mean().backward()
    own = gradients(alone)
    expected = _flat(own)
    dist.all_reduce(expected)
    expected /= group.world
    observed = {name: observe(name, group, expected) for name in STRATEGIES}
    strips: list[Any] = [None] * group.world
    dist.all_gather_object(strips, (_cells(own), _cells(observed["fastsync"][1])))
    parameters = []
    for name, grad in own.items():
        before, after = (tuple(of[side][name] for of in strips) for side in range(2))
        parameters.append(Parameter(name, tuple(grad.shape), grad.nbytes, before, after))
    return Picture(group.transport, tuple(parameters), tuple(run for run, _ in observed.values()))
