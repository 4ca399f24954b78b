"""The norm of all gradients, and clipping to it.

From the first clip on, the code that adds averages up sums their squares too. So shared gradients
are not read here, nor averages that are unchanged. Other gradients are read once. Gradients are
written only if they are too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from fastsync._torch import is_dtensor, local_gradient, mesh_groups, spec_of
from fastsync.reducer import core
from fastsync.zero.exchange import Exchange
from fastsync.zero.gradient_proxies import ShardedGradient, ShardGroup

_PLACE = "the norm of all gradients"
_EPSILON = 1e-6  # as in torch
_LAYOUTS = (torch.strided, torch.sparse_coo)
_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class Apart:
    """Gradients that not all ranks have.

    Attributes:
        exchange: all ranks.
        parts: ids of parameters, and how many ranks have the same gradients of them, or other parts
            of these.
    """

    exchange: Exchange
    parts: Sequence[tuple[Collection[int], int]]

    def split(
        self, params: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[tuple[list[torch.Tensor], int]]]:
        """Return the parameters whose gradients all ranks have, and the others by part."""
        apart = {index for ids, _ in self.parts for index in ids}
        parts = [([p for p in params if id(p) in ids], ranks) for ids, ranks in self.parts]
        return [p for p in params if id(p) not in apart], parts


@dataclass(frozen=True)
class Holders:
    """Objects that hold gradients, and may know the sums of their squares.

    Attributes:
        reducer: the reducer that averages them.
        shard_group: the ranks that they may be spread over.
        apart: those that not all ranks have; None: all have all.
    """

    reducer: core.Reducer
    shard_group: ShardGroup | None
    apart: Apart | None = None


@dataclass(frozen=True)
class _Squares:
    """One rank's sums of squares of gradients.

    Attributes:
        owned: this rank's part of the sum of the squares of elements that not every rank has.
        common: the sum for elements that every rank has.
        exchange: the ranks that gradients are spread over; None where each has all of them.
        wide: whether fp64 is among them.
        tensors: returns those that hold them.
    """

    owned: float
    common: float
    exchange: Exchange | None
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

    Collective where gradients are spread over ranks, or DTensors. What is not a 2-norm on a CPU is
    torch's.

    Returns:
        The total norm before, zero-dimensional: fp32, or fp64 where a gradient is.

    Raises:
        RuntimeError: it is not finite, and the caller wants an error then.
    """
    params = list(params)
    mixed = [is_dtensor(param) for param in params]
    # Ranks that average DTensors apart may have other gradients: what all ranks do goes by the
    # parameters.
    squares = None if norm_type != 2.0 or any(mixed) else _squares(params, holders)
    if squares is None:
        if holders.apart is None and not any(mixed):
            return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        norm = _norm_over_parts(params, norm_type, holders.apart)
        _check(norm, norm_type, error_if_nonfinite)
        for kind in set(mixed):  # torch mixes no DTensors with others
            its = [param for param, is_cut in zip(params, mixed, strict=True) if is_cut == kind]
            clip_grads_with_norm_(its, max_norm, norm)
        return norm
    total = squares.common
    if squares.exchange is not None:
        total += squares.exchange.sum(_PLACE, squares.owned)
    norm = torch.tensor(math.sqrt(total), dtype=torch.float64, device="cpu")
    _check(norm, norm_type, error_if_nonfinite)
    share = _rounded(max_norm / (norm.item() + _EPSILON))
    tensors = [] if share >= 1.0 else squares.tensors()  # where it is NaN, too
    if tensors:
        torch._foreach_mul_(tensors, share)
    return norm if squares.wide else norm.to(torch.float32)


def _check(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _norm_over_parts(
    params: Sequence[torch.Tensor], norm_type: float, apart: Apart | None
) -> torch.Tensor:
    """Return the norm of all gradients, each counted once. Collective."""
    device = params[0].device
    common, parts = (params, []) if apart is None else apart.split(params)
    power = _power(common, norm_type, device)
    if apart is not None:
        powers = [_power(its, norm_type, device) for its, _ in parts]
        if norm_type == math.inf:
            power = torch.stack([power, *powers]).amax()
            apart.exchange.reduce(power, _PLACE, dist.ReduceOp.MAX)
        else:
            shares = zip(powers, parts, strict=True)
            own = torch.stack([each / ranks for each, (_, ranks) in shares]).sum()
            apart.exchange.reduce(own, _PLACE)
            power = power + own
    norm = power if norm_type == math.inf else power ** (1.0 / norm_type)
    return norm if any(p.dtype in _WIDE for p in params) else norm.to(torch.float32)


def _power(params: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the powers of the elements of gradients, or their largest magnitude.

    Collective over the ranks that have other parts of DTensors.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {(): []}
    for param in params:
        grads = by_groups.setdefault(mesh_groups(param, cut=True), [])
        if param.grad is not None:
            cut = is_dtensor(param)
            grad = local_gradient(param.grad, spec_of(param)) if cut else param.grad
            grads.append(grad.coalesce().values() if grad.is_sparse else grad)
    largest = norm_type == math.inf
    powers = []
    for groups, grads in by_groups.items():
        norm = get_total_norm([grad for grad in grads if grad.numel()], norm_type)
        power = norm.to(device, torch.float64) ** (1.0 if largest else norm_type)
        for group in groups:
            dist.all_reduce(power, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        powers.append(power)
    every = torch.stack(powers)
    return every.amax() if largest else every.sum()


def _rounded(share: float) -> float:
    """Round to fp32: ranks that add up in different ways must scale alike."""
    return torch.tensor(share, dtype=torch.float32, device="cpu").item() if share < 1e38 else share


def _squares(params: Sequence[torch.Tensor], holders: Holders) -> _Squares | None:
    """Return the sums of squares; None where they are not those of elements on this CPU."""
    if holders.apart is None:
        return _known(params, holders) or _read(params)
    common, parts = holders.apart.split(params)
    whole = _known(common, holders) or _read(common)
    others = [(_known(its, holders) or _read(its), ranks) for its, ranks in parts]
    known = [(squares, ranks) for squares, ranks in others if squares is not None]
    if whole is None or len(known) < len(others):
        return None
    every = [whole, *(squares for squares, _ in known)]
    return _Squares(
        owned=whole.owned + sum(squares.common / ranks for squares, ranks in known),
        common=whole.common,
        exchange=holders.apart.exchange,
        wide=any(squares.wide for squares in every),
        tensors=lambda: [tensor for squares in every for tensor in squares.tensors()],
    )


def _known(params: Sequence[torch.Tensor], holders: Holders) -> _Squares | None:
    """Return the sums without a read of sharded gradients, or of sums of buckets; None if
    impossible."""
    units = [] if holders.shard_group is None else holders.shard_group.units
    known = holders.reducer.squares(params, [unit.core for unit in units])
    if known is None:
        return None

    def tensors() -> list[torch.Tensor]:
        if known.all_spread:
            return known.tensors + [unit.shard for unit in units]
        grads = (param.grad for param in params)
        spread = (grad for grad in grads if isinstance(grad, ShardedGradient))
        return known.tensors + [grad.share.piece for grad in spread]

    exchange = holders.shard_group.exchange if holders.shard_group and known.spread else None
    return _Squares(known.owned, known.common, exchange, known.wide, tensors)


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
    exchange = next((grad.share.shards().shard_group.exchange for grad in spread), None)
    wide = any(tensor.dtype in _WIDE for tensor in tensors)
    return _Squares(total[True], total[False], exchange, wide, lambda: tensors)


def _is_plain(grad: torch.Tensor) -> bool:
    """Return whether its elements lie on this CPU: all of them, or those that this rank owns."""
    if isinstance(grad, ShardedGradient):
        known = grad.share.is_average and not grad.share.released
        return known and grad.share.piece.is_cpu
    return grad.is_cpu and grad.layout in _LAYOUTS and type(grad) is torch.Tensor


def _elements(grad: torch.Tensor) -> torch.Tensor:
    return grad.share.piece if isinstance(grad, ShardedGradient) else grad
