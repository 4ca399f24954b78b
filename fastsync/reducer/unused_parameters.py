"""Parameters that a backward left without gradient, and what is said of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fastsync._torch import caller_level

_NAMES_SHOWN = 10


@dataclass(frozen=True)
class NamedParam:
    """A parameter, its fully qualified name, and whether its gradient may be sparse."""

    name: str
    tensor: torch.Tensor
    sparse: bool = False


class UnusedParams:
    """Warnings about unused parameters; also notices parameters that were replaced.

    Args:
        params: those that were wrapped.
        group: the group whose ranks average their gradients.
        warn: whether the user wants to know.

    Attributes:
        current: asks the module for the parameters that it has now.
    """

    def __init__(self, params: Sequence[NamedParam], group: dist.ProcessGroup, warn: bool) -> None:
        self.current: Callable[[], Sequence[NamedParam]] | None = None
        self._wrapped = {param.name: param.tensor for param in params}
        self._group = group
        self._warn = warn

    def look_at(self, names: Sequence[str]) -> None:
        """Report parameters that got no gradient, some for the first time.

        Raises:
            RuntimeError: they are not the module's any more.
        """
        gone = self._gone(names)
        if gone:
            raise RuntimeError(_replaced(gone, self._group.rank()))
        warn, self._warn = self._warn, False
        if warn:
            warnings.warn(_unused(names, self._group.rank()), stacklevel=caller_level())

    @contextmanager
    def naming_replaced(self) -> Iterator[None]:
        """Name replaced parameters in an error of the reducer that may follow from them.

        Raises:
            RuntimeError: parameters that were to be trained are not the module's any more.
        """
        try:
            yield
        except RuntimeError as error:
            trained = [name for name, tensor in self._wrapped.items() if tensor.requires_grad]
            gone = self._gone(trained)
            if gone:
                raise RuntimeError(_replaced(gone, self._group.rank())) from error
            raise

    def _gone(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` for which the module has got other tensors."""
        if self.current is None:
            return []
        now = {param.name: param.tensor for param in self.current()}
        wrapped = set(map(id, self._wrapped.values()))
        if all(id(tensor) in wrapped for tensor in now.values()):
            return []  # what was only removed is not trained any more
        return [name for name in names if now.get(name) is not self._wrapped[name]]


def _unused(names: Sequence[str], rank: int) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (
        f"rank {rank}: {len(names)} parameters got no gradient in the last backward: {shown}{more}"
        ". fastsync handles this; gradients that no rank produced stay untouched. Pass "
        "find_unused_parameters=False to make it an error, or True to silence this warning"
    )


def _replaced(names: Sequence[str], rank: int) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"rank {rank}: parameter {names[0]!r}{more} of the module is another tensor than the one "
        "that was wrapped, so its gradients are not averaged and the ranks have diverged since: it "
        "was replaced by load_state_dict(assign=True), or a layer was assigned anew. Make such "
        "changes before FastDDP(model), and restart from the last checkpoint"
    )
