"""Gradients that no backward has averaged, on which an optimizer is about to step.

Under DDP such a step makes the ranks' parameters differ. Here each rank steps on its own pieces of
the parameters, so that all ranks would get the same parameters, made of gradients of different
ranks. Nothing is wrong where a script has averaged the gradients itself: then they are equal. Nor
is it where another wrapper of the same parameters has, for which no rank needs to ask the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fastsync.reducer import core
from fastsync.reducer.engine import Engine, engines
from fastsync.reducer.monitor import number_of
from fastsync.zero.exchange import Exchange
from fastsync.zero.gradient_proxies import ShardedGradient

_DIGITS = (1 << 40) - 1  # so that a sum over some thousand ranks is exact in fp64


def check_averaged(params: Iterable[torch.Tensor], engine: Engine, exchange: Exchange) -> None:
    """Check that the ranks have the same gradients where a backward has not averaged them.

    Collective where there are any.

    Args:
        params: those that an optimizer steps on; of DTensors, the local tensors.

    Raises:
        RuntimeError: the gradients differ, on every rank.
    """
    accumulated = engine.core.accumulated()
    if not accumulated or engine.group.size() == 1:
        return
    ours = {id(param): param.grad for param in params}
    found = [i for i in accumulated if id(engine.locals.tensors[i]) in ours]
    elsewhere = {
        id(other.params[i].tensor)
        for other in (engines() if found else ())
        if other is not engine
        for i in other.core.averaged()
    }
    found = [i for i in found if id(engine.params[i].tensor) not in elsewhere]
    if not found:
        return
    digests = core.digests([part for grad in ours.values() for part in _local_parts(grad)])
    mine = hash(tuple(digests)) & _DIGITS
    everyones = exchange.sum("a step on gradients that no backward has averaged", float(mine))
    if everyones != mine * engine.group.size():
        name = engine.params[found[0]].name
        raise RuntimeError(
            f"rank {number_of(engine.group)}: an optimizer is about to step on gradients that were "
            f"not averaged and differ between the ranks, such as that of {name!r}. Since the last "
            "backward that synchronised there was one under no_sync(), through model.module, or "
            "again through the same graph. With zero=1 or 2 each rank steps on pieces of the "
            "parameters, so that ranks cannot train apart: let the last backward before a step "
            "synchronise, by a forward of the wrapper outside no_sync(), or use zero=0"
        )


def _local_parts(grad: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield what this rank alone may have in a gradient."""
    if isinstance(grad, ShardedGradient):
        grad = grad.share.whole if grad.share.whole is not None else grad.share.pending
    if grad is None:
        return
    if grad.is_sparse:
        grad = grad.coalesce()
        yield grad.indices()
        yield grad.values()
    else:
        yield grad
