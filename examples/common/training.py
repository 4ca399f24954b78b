"""Trainings: a model with its data, made alike at every call, and variants in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.common.ranks import Group
from examples.common.variants import Variant

BATCHES = 4

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        name: as given on the command line.
        build: makes the model on the CPU, the same one at every call.
        batch: the input of one (rank, step), on the CPU.
        loss: the scalar loss of the model's output.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor]
    loss: Callable[[Tensor], Tensor]


@dataclass
class Lane:
    """A wrapped model that trains step by step.

    Attributes:
        module: the model without its wrapper.
        model: what is called in training.
        update: whether a step ends with the optimizer's, else only with the gradients.
        position: steps done.
    """

    workload: Workload
    module: nn.Module
    model: Any
    optimizer: torch.optim.Optimizer
    batches: list[Tensor]
    update: bool
    position: int = 0

    def forward(self) -> Tensor:
        """zero_grad (to None), then the loss of the next batch."""
        self.optimizer.zero_grad(set_to_none=True)
        batch = self.batches[self.position % len(self.batches)]
        self.position += 1
        return self.workload.loss(self.model(batch))

    def step(self) -> Tensor:
        """zero_grad (to None), forward, backward and, with `update`, the optimizer's step."""
        loss = self.forward()
        loss.backward()
        if self.update:
            self.optimizer.step()
        return loss

    def weights(self) -> Tensor:
        """Return all weights in one vector of fp64. Collective where ranks share them."""
        whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in self.module.parameters())
        return torch.cat([p.detach().double().flatten() for p in whole])

    def steps(self, count: int) -> None:
        """Make so many steps."""
        for _ in range(count):
            self.step()


def rate_share(step: int, steps: int, warmup: int, floor: float = 0.0) -> float:
    """Return the share of the peak rate: a linear warm-up, then a cosine from 1 to `floor`."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * cosine)


def make_batches(workload: Workload, group: Group, count: int = BATCHES) -> list[Tensor]:
    """This rank's first `count` batches, on its device."""
    return [workload.batch(group.rank, step).to(group.device) for step in range(count)]


def make_lane(
    workload: Workload,
    variant: Variant,
    group: Group,
    optimizer: str | None,
    batches: list[Tensor] | None = None,
) -> Lane:
    """Build and wrap the model.

    Args:
        optimizer: a key of OPTIMIZERS; None leaves the weights as they are.
        batches: to share between lanes; by default made here.
    """
    module = workload.build().to(group.device)
    model = variant.wrap(module, group.device)
    made = OPTIMIZERS[optimizer or "sgd"](module.parameters())
    inputs = make_batches(workload, group) if batches is None else batches
    return Lane(workload, module, model, made, inputs, update=optimizer is not None)


def make_lanes(
    workload: Workload, variants: Sequence[Variant], group: Group, optimizer: str | None = None
) -> dict[str, Lane]:
    """Return one lane per variant, all on the same batches.

    Without an optimizer the weights do not change, so all lanes share those of the first: a dozen
    variants of a large model would not fit into memory.
    """
    batches = make_batches(workload, group)
    lanes: dict[str, Lane] = {}
    for variant in variants:
        lane = lanes[variant.name] = make_lane(workload, variant, group, optimizer, batches)
        if optimizer is None:
            owner = next(iter(lanes.values())).module
            for mine, its in zip(lane.module.parameters(), owner.parameters(), strict=True):
                mine.data = its.data
    return lanes
