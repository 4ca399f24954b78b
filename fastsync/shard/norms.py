"""The norm of all gradients, and clipping to it: one read of each element that a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils import clip_grad_norm_

from fastsync.engine import core
from fastsync.shard.gradients import ShardedGradient

__all__ = ["clip_norm"]

_EPSILON = 1e-6  # as in torch
_LAYOUTS = (torch.strided, torch.sparse_coo)


def clip_norm(
    params: Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scales gradients so that their total norm is `max_norm` at most.

    Collective where gradients are spread over ranks. What is not a 2-norm on a CPU is torch's.

    Returns:
        The total norm before, zero-dimensional: fp32, or fp64 where a gradient is.

    Raises:
        RuntimeError: it is not finite, and the caller wants an error then.
    """
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    if norm_type != 2.0 or not all(map(_is_plain, grads)):
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    mine = [_elements(grad) for grad in grads]
    norm = math.sqrt(_total(grads, core.square_sums(mine)))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    share = max_norm / (norm + _EPSILON)
    if mine and not share >= 1.0:  # nor where it is NaN
        torch._foreach_mul_(mine, share)
    wide = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in mine)
    return torch.tensor(norm, dtype=torch.float64 if wide else torch.float32)


def _is_plain(grad: torch.Tensor) -> bool:
    """Whether its elements lie on this CPU: all of them, or those that this rank owns."""
    if isinstance(grad, ShardedGradient):
        known = grad.share.is_average and not grad.share.released
        return known and grad.share.piece.is_cpu
    return grad.is_cpu and grad.layout in _LAYOUTS and type(grad) is torch.Tensor


def _elements(grad: torch.Tensor) -> torch.Tensor:
    return grad.share.piece if isinstance(grad, ShardedGradient) else grad


def _total(grads: Sequence[torch.Tensor], squares: Sequence[float]) -> float:
    """The sum of all squares, of which each rank has some twice and some not at all."""
    total = {True: 0.0, False: 0.0}
    for grad, square in zip(grads, squares, strict=True):
        total[isinstance(grad, ShardedGradient)] += square
    sharded = next((grad for grad in grads if isinstance(grad, ShardedGradient)), None)
    if sharded is not None:
        total[True] = sharded.share.shards().sharers.sum("the norm of all gradients", total[True])
    return total[True] + total[False]
