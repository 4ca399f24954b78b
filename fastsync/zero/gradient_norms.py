"""The norm of all gradients, and clipping to it.

From the first clip on, the code that adds averages up sums their squares too. So shared gradients
are not read here, nor averages that are unchanged. Other gradients are read once. Gradients are
written only if they are too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grad_norm_

from fastsync.reducer import core
from fastsync.zero.gradient_proxies import ShardedGradient, ShardGroup

__all__ = ["Holders", "clip_norm"]

_EPSILON = 1e-6  # as in torch
_LAYOUTS = (torch.strided, torch.sparse_coo)
_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class Holders:
    """Objects that hold gradients, and may know the sums of their squares.

    Attributes:
        reducer: the reducer that averages them.
        sharers: the ranks that they may be spread over.
    """

    reducer: core.Reducer
    sharers: ShardGroup | None


@dataclass(frozen=True)
class _Squares:
    """One rank's sums of squares of gradients.

    Attributes:
        owned: the sum of the squares of elements that this rank alone has.
        common: the same for elements that every rank has.
        sharers: the ranks that gradients are spread over; None where each has all of them.
        wide: whether fp64 is among them.
        tensors: returns those that hold them.
    """

    owned: float
    common: float
    sharers: ShardGroup | None
    wide: bool
    tensors: Callable[[], list[torch.Tensor]]


def clip_norm(
    params: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    holders: Holders,
) -> torch.Tensor:
    """Scale gradients so that their total norm is `max_norm` at most.

    Collective where gradients are spread over ranks. What is not a 2-norm on a CPU is torch's.

    Returns:
        The total norm before, zero-dimensional: fp32, or fp64 where a gradient is.

    Raises:
        RuntimeError: it is not finite, and the caller wants an error then.
    """
    params = list(params)
    squares = _known(params, holders) or _read(params) if norm_type == 2.0 else None
    if squares is None:
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    total = squares.common
    if squares.sharers is not None:
        total += squares.sharers.exchange.sum("the norm of all gradients", squares.owned)
    norm = math.sqrt(total)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    share = _rounded(max_norm / (norm + _EPSILON))
    tensors = [] if share >= 1.0 else squares.tensors()  # where it is NaN, too
    if tensors:
        torch._foreach_mul_(tensors, share)
    return torch.tensor(norm, dtype=torch.float64 if squares.wide else torch.float32)


def _rounded(share: float) -> float:
    """Round to fp32: ranks that add up in different ways must scale alike."""
    return torch.tensor(share, dtype=torch.float32).item() if share < 1e38 else share


def _known(params: Sequence[torch.Tensor], holders: Holders) -> _Squares | None:
    """Return the sums without a read of sharded gradients, or of sums of buckets; None if
    impossible."""
    units = [] if holders.sharers is None else holders.sharers.units
    known = holders.reducer.squares(params, [unit.core for unit in units])
    if known is None:
        return None

    def tensors() -> list[torch.Tensor]:
        if known.all_spread:
            return known.tensors + [unit.shard for unit in units]
        grads = (param.grad for param in params)
        spread = (grad for grad in grads if isinstance(grad, ShardedGradient))
        return known.tensors + [grad.share.piece for grad in spread]

    spread_over = holders.sharers if known.spread else None
    return _Squares(known.owned, known.common, spread_over, known.wide, tensors)


def _read(params: Sequence[torch.Tensor]) -> _Squares | None:
    """Sum the squares of gradients; return None where they are not elements on this CPU."""
    grads = [param.grad for param in params if param.grad is not None]
    if not all(map(_is_plain, grads)):
        return None
    tensors = [_elements(grad) for grad in grads]
    total = {True: 0.0, False: 0.0}
    for grad, square in zip(grads, core.square_sums(tensors), strict=True):
        total[isinstance(grad, ShardedGradient)] += square
    spread = (grad for grad in grads if isinstance(grad, ShardedGradient))
    spread_over = next((grad.share.shards().sharers for grad in spread), None)
    wide = any(tensor.dtype in _WIDE for tensor in tensors)
    return _Squares(total[True], total[False], spread_over, wide, lambda: tensors)


def _is_plain(grad: torch.Tensor) -> bool:
    """Return whether its elements lie on this CPU: all of them, or those that this rank owns."""
    if isinstance(grad, ShardedGradient):
        known = grad.share.is_average and not grad.share.released
        return known and grad.share.piece.is_cpu
    return grad.is_cpu and grad.layout in _LAYOUTS and type(grad) is torch.Tensor


def _elements(grad: torch.Tensor) -> torch.Tensor:
    return grad.share.piece if isinstance(grad, ShardedGradient) else grad
