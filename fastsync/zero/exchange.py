"""Exchanges that every rank has to ask for: a rank that asks alone gets an error, not an endless
wait.

Ranks of one machine meet in memory, where a meeting takes about as long as waking a process does;
others through the rendezvous store.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastsync._torch import WrapperTensor
from fastsync.faults.rendezvous import Rendezvous
from fastsync.reducer import core
from fastsync.reducer.monitor import number_of, numbers_of, watched
from fastsync.reducer.unused_parameters import NamedParam

_REMEDY = (
    "Gradients and the optimizer's state are spread over the ranks: look at them on every rank, or "
    "on none. "
    "FastDDP(zero=0) keeps all of them everywhere"
)


class Exchange:
    """Ranks that exchange what they have of gradients.

    Args:
        group: the ranks.
        place: where they meet before they exchange anything.
        statements: where they meet instead, if they share memory.
        params: those of the wrapped module, on one device. What a rank asks for names its
            parameter, so that ranks that ask for different ones of the same shape are told.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        place: Rendezvous,
        statements: core.SharedStatements | None,
        params: Sequence[NamedParam],
    ) -> None:
        self.group, self._place, self._statements = group, place, statements
        self._device = params[0].tensor.device
        self._names = {id(param.tensor): param.name for param in params}

    def name_of(self, param: torch.Tensor) -> str:
        """Return the name of a parameter of the wrapped module."""
        return self._names[id(param)]

    def meet(self, wish: str) -> None:
        """Wait until every rank wants to exchange the same.

        Raises:
            RuntimeError: some do not come, or want something else.
        """
        if self._statements is not None:
            self._tell(self._statements, wish, 0.0)
        elif not self._place.meet(f"the others to ask for {wish}", wish, _REMEDY):
            raise self._disagreement(wish)

    def sum(self, wish: str, mine: float) -> float:
        """Return the sum of `mine` over the ranks. Collective; see `meet`."""
        if self._statements is not None:
            return sum(self._tell(self._statements, wish, mine))
        self.meet(wish)
        total = torch.tensor([mine], dtype=torch.float64, device=self._device)
        self.reduce(total, wish)
        return total.item()

    def reduce(
        self, tensor: torch.Tensor, wish: str, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce in place over the ranks, which have met for it. Collective."""
        start = partial(dist.all_reduce, tensor, how, group=self.group, async_op=True)
        watched(self.group, wish, start)

    def _tell(self, statements: core.SharedStatements, wish: str, mine: float) -> list[float]:
        """Return each rank's number, by rank."""
        try:
            everyones = statements.exchange(wish, mine)
        except RuntimeError as error:
            ranks = [*numbers_of(self.group)]
            whose = "" if ranks == [*range(len(ranks))] else f" (of ranks {ranks})"
            raise RuntimeError(f"{error}{whose}. {_REMEDY}") from error
        if everyones is None:
            raise self._disagreement(wish)
        return everyones

    def _disagreement(self, wish: str) -> RuntimeError:
        return RuntimeError(
            f"rank {number_of(self.group)} asks for {wish}, but other ranks ask for something "
            f"else. {_REMEDY}"
        )


class SpreadTensor(WrapperTensor):
    """A tensor that stands for elements which are spread over the ranks."""

    def whole(self) -> torch.Tensor:
        """Return all elements. Collective, unless this rank has them."""
        raise NotImplementedError

    @classmethod
    def is_number(cls, value: object) -> bool:
        """Return whether an operand is the same for all elements, and known here."""
        return not isinstance(value, torch.Tensor) or (
            value.dim() == 0 and not isinstance(value, cls)
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}; spread over the "
            "ranks: clone() it on every rank to see its elements)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.whole().clone()

    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.whole().__dlpack__(**options)
