"""A step of the user's own model, measured on the ranks that will train it.

All ranks compute at once, and none talks to another: what communication costs is for plans to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from fastsync.planner.compute import Compute
from fastsync.planner.profile import OwnStep
from fastsync.planner.record import Record
from fastsync.planner.rounds import rounds, slowest
from fastsync.planner.tracing import Loss, TraceError, default_loss, make_batch, make_optimizer

__all__ = ["Training", "measure_step", "with_step"]

_WARMUP = 2  # steps


@dataclass(frozen=True)
class Training:
    """What one rank trains.

    Attributes:
        name: of the model, as the command line has it.
        build: makes it, on the CPU.
        batch: sizes of its input.
        dtype: that floating-point parameters are converted to; None: they stay as they are.
        optimizer: of torch.optim, in any case.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: tuple[int, ...]
    loss: Loss | None
    dtype: torch.dtype | None
    optimizer: str


def measure_step(training: Training, device: torch.device) -> OwnStep:
    """The parts of a step, in seconds of the slowest rank. Collective.

    Raises:
        ValueError: the model does not make a step on every rank; says why.
    """
    try:
        module = training.build().to(device, training.dtype).train()
        batch = make_batch(module, training.batch).to(device)
        loss = training.loss or default_loss
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = make_optimizer(training.optimizer, trained)

        def step() -> tuple[float, float, float]:
            return _timed_step(module, batch, loss, optimizer)

        for _ in range(_WARMUP):
            step()
        failure = ""
    except (RuntimeError, TypeError, TraceError, ValueError) as error:
        failure = (str(error).splitlines() or [type(error).__name__])[0]
    _check_all(training, failure)
    times = []
    for _ in rounds(device):
        dist.barrier()
        times.append(step())
    forward, backward, update = (
        slowest(median(column), device) for column in zip(*times, strict=True)
    )
    return OwnStep(
        model=type(module).__name__,
        tensors=len(trained),
        numel=sum(param.numel() for param in trained),
        batch=tuple(training.batch),
        sample_bytes=batch.nbytes // batch.shape[0],
        optimizer=type(optimizer).__name__,
        forward=forward,
        backward=backward,
        update=update,
    )


def _check_all(training: Training, failure: str) -> None:
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, each in enumerate(failures):
        if each:
            sizes = "x".join(map(str, training.batch))
            raise ValueError(
                f"--model {training.name} with --batch {sizes} makes no step on rank {rank}: {each}"
            )


def _timed_step(
    module: nn.Module, batch: torch.Tensor, loss: Loss, optimizer: torch.optim.Optimizer
) -> tuple[float, float, float]:
    """Seconds of forward, backward and the optimizer's step."""

    def now() -> float:
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
        return time.perf_counter()

    optimizer.zero_grad()
    begun = now()
    value = loss(module(batch), batch)
    forward = now()
    value.backward()
    backward = now()
    optimizer.step()
    return forward - begun, backward - forward, now() - backward


def with_step(
    traced: Compute, record: Record, optimizer: str, step: OwnStep
) -> tuple[Compute | None, str]:
    """The traced computing times as long as the measured ones.

    None where the step is one of another model, which is said in words.

    Args:
        optimizer: that is planned with; where it is another, its step stays as traced.
    """
    planned = (record.model, len(record.params), record.numel, record.inputs // record.samples)
    if planned != (step.model, step.tensors, step.numel, step.sample_bytes):
        return None, f"the profile's own step is one of {step}, and not used"
    factor = record.samples / step.batch[0]
    forward, backward = step.forward * factor, step.backward * factor
    source = f"measured: a step of {step}"
    made = traced.as_recorded(Compute(forward, backward, (), 0.0, source=source))
    if optimizer.lower() == step.optimizer.lower():
        made = replace(made, update=step.update, source=f"{source}; order of gradients: traced")
    return made, ""
