"""One variant in training: a model, its wrapper, an optimizer and batches made in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bench.launch import Group
from bench.models import Workload
from bench.wrappers import Variant

BATCHES = 4

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


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
    model: nn.Module
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
    """Builds and wraps the model.

    Args:
        optimizer: a key of OPTIMIZERS; None leaves the weights as they are.
        batches: to share between lanes; by default made here.
    """
    module = workload.build().to(group.device)
    model = variant.wrap(module, group.device)
    made = OPTIMIZERS[optimizer or "sgd"](module.parameters())
    inputs = make_batches(workload, group) if batches is None else batches
    return Lane(workload, module, model, made, inputs, update=optimizer is not None)
