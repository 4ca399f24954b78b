"""State that coding carries from step to step, by parameter name: plans change, parameters stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastsync.plan.topology import Network

if TYPE_CHECKING:
    from fastsync.engine.core import Reducer

__all__ = ["Carried", "Progress"]


@dataclass(frozen=True)
class Progress:
    """Progress of a training, as far as its buckets and schedules depend on it.

    Attributes:
        steps: synchronised steps so far.
        order: names of parameters, perhaps others than are trained now, in the order of the
            buckets.
        network: as this rank measured it, for bytes of gradients.
    """

    steps: int
    order: Sequence[str]
    network: Network


@dataclass(frozen=True)
class Carried:
    """Tensors of one rank, fp32, by the name of the state, then of the parameter.

    Attributes:
        states: "residual": what error feedback has kept back of the averages, of the parameter's
            shape; "factor": what PowerSGD's next step starts with, [rank, columns], the same on all
            ranks.
    """

    states: Mapping[str, Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, reducer: Reducer, names: Sequence[str]) -> Carried:
        """Copies of what the C++ `reducer` of the parameters `names` holds."""

        def by_name(tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
            return {name: t for name, t in zip(names, tensors, strict=True) if t is not None}

        return cls({state: by_name(held) for state, held in reducer.states().items()})

    @property
    def residuals(self) -> Mapping[str, torch.Tensor]:
        """Return the residuals of error feedback, by parameter."""
        return self.states["residual"]

    @property
    def factors(self) -> Mapping[str, torch.Tensor]:
        """Return the factors that PowerSGD's next step starts with, by parameter."""
        return self.states["factor"]

    def load_into(self, reducer: Reducer, devices: Mapping[str, torch.device]) -> None:
        """Replace the state that `reducer` holds; parameters that are missing here then carry none.

        Args:
            devices: device of each of its parameters, by name, in its order.
        """

        def by_index(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
            found = ((tensors.get(name), device) for name, device in devices.items())
            return [None if t is None else t.to(device, torch.float32) for t, device in found]

        reducer.load_states({state: by_index(held) for state, held in self.states.items()})
