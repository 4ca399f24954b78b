"""Gradients of which each rank keeps its own region, and the proxies that scripts see of them.

After a backward that synchronises, a rank has the averages of the elements that it owns and no
others. `param.grad` is then a `ShardedGradient`: it has the parameter's shape, dtype and device,
but no memory. What it is asked for decides what happens:

* Norms, and in-place operations that treat all elements alike (clipping, unscaling, zeroing), work
  on the regions; ranks exchange scalars.
* A gradient that is added, as autograd does under `no_sync()`, waits beside it for the next
  backward.
* Anything else makes it whole: the ranks collect it, and `param.grad` is a plain tensor from then
  on.

Exchanges first meet through the rendezvous store, so that a rank that asks alone gets an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from fastsync._torch import local_part, set_local, tree_map_only
from fastsync.reducer import core
from fastsync.reducer.weak_calls import weakly
from fastsync.zero.exchange import Exchange, SpreadTensor
from fastsync.zero.flat_buffer import FlatBuffer


class ShardGroup:
    """The ranks that share gradients, and all units of these.

    Args:
        exchange: of what the ranks have.
        dtensors: those whose local tensors are among the parameters of the units, by the ids of
            these.
    """

    def __init__(self, exchange: Exchange, dtensors: Mapping[int, torch.Tensor]) -> None:
        self.exchange, self.dtensors = exchange, dtensors
        self.units: list[GradientShards] = []
        self._norms: dict[int, list[torch.Tensor]] = {}
        self._norms_of: tuple[object, ...] = ()

    def norm(self, share: Share, order: float) -> torch.Tensor:
        """Return the norm of one gradient. Those of all others come with it, in one exchange."""
        state = (order, *((id(unit), unit.version()) for unit in self.units))
        if state != self._norms_of:
            self._norms = self._exchange_norms(order)
            self._norms_of = state
        norm = self._norms[id(share.shards())][share.index]
        return norm.clone()

    def _exchange_norms(self, order: float) -> dict[int, list[torch.Tensor]]:
        self.exchange.meet(f"norms of order {order:g} of gradients")
        pieces = [share.piece for unit in self.units for share in unit.shares()]
        local = torch.stack([_powers(piece, order) for piece in pieces])
        how = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
        self.exchange.reduce(local, "norms of gradients", how)
        if order != float("inf"):
            local = local.pow(1.0 / order)
        norms = iter(local.unbind())
        return {id(unit): [next(norms).to(unit.dtype) for _ in unit.proxies] for unit in self.units}


def _powers(piece: torch.Tensor, order: float) -> torch.Tensor:
    """Return the sum of |x|^order; the largest |x| where it is infinite."""
    wide = torch.float64 if piece.dtype is torch.float64 else torch.float32
    if piece.numel() == 0:
        return torch.zeros((), dtype=wide, device=piece.device)
    norm: torch.Tensor = torch.linalg.vector_norm(piece, order, dtype=wide)
    return norm if order == float("inf") else norm.pow(order)


class Share:
    """One rank's part of one parameter's gradient.

    Attributes:
        piece: the averages of the elements that this rank owns, one-dimensional.
        begin: the first of them, in the order of the parameter's memory.
        whole: all elements, once the script has asked for them. `piece` means nothing then.
        released: the values are those of an earlier backward, and are still referenced.
    """

    def __init__(self, shards: GradientShards, index: int, piece: torch.Tensor, begin: int) -> None:
        self._shards = weakref.ref(shards)
        self.index, self.piece, self.begin = index, piece, begin
        self.whole: torch.Tensor | None = None
        self.released = False
        self._pending: torch.Tensor | None = None

    def shards(self) -> GradientShards:
        """Return the unit.

        Raises:
            RuntimeError: its model is gone.
        """
        alive = self._shards()
        if alive is None:
            raise RuntimeError(
                "this gradient was spread over the ranks by a FastDDP that is gone; set it to None"
            )
        return alive

    @property
    def pending(self) -> torch.Tensor | None:
        """Return what this rank has accumulated since the averages came."""
        return self._pending if self.released else self.shards().core.pending(self.index)

    @pending.setter
    def pending(self, local: torch.Tensor | None) -> None:
        if self.released:
            self._pending = local
        else:
            self.shards().core.set_pending(self.index, local)

    @property
    def is_average(self) -> bool:
        """Return whether the regions are all there is."""
        return self.whole is None and self.pending is None

    def release(self) -> None:
        """Copy the values, so that a proxy that is still referenced keeps them."""
        pending, self.pending = self.pending, None
        self.piece = self.piece.clone()
        self.released, self._pending = True, pending

    def add(self, local: torch.Tensor) -> None:
        """Accumulate a gradient of this rank."""
        if not self.released:
            self.shards().core.add(self.index, local)
        elif self._pending is not None:
            self._pending.add_(local)
        else:
            self._pending = torch.empty_like(self.shards().params[self.index]).copy_(local)

    def owned(self) -> torch.Tensor:
        """Return the elements that this rank owns, one-dimensional, with what
        it has added to them.
        """
        numel, pending = self.piece.numel(), self.pending
        if pending is None:
            return self.piece
        start = pending.storage_offset() + self.begin
        return self.piece + pending.as_strided((numel,), (1,), start)

    def collected(self) -> torch.Tensor:
        """Return all elements. Collective, unless they have been asked for before."""
        if self.whole is not None:
            return self.whole
        whole, pending = self.shards().collect(self), self.pending
        return whole if pending is None else whole + pending

    def make_whole(self) -> torch.Tensor:
        """Return all elements, which `param.grad` has from now on. Collective
        like `collected()`.
        """
        if self.whole is None:
            self.whole = self.collected()
            if not self.released:
                self.shards().replace(self.index, self.whole)
        return self.whole


class ShardedGradient(SpreadTensor):
    """Tensor in `param.grad` that stands for a gradient spread over the ranks."""

    share: Share
    _handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @staticmethod
    def __new__(cls, like: torch.Tensor, share: Share) -> ShardedGradient:
        proxy = cls.without_memory(like)
        proxy.share = share
        return proxy

    def whole(self) -> torch.Tensor:
        return self.share.make_whole()

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)

    def data_ptr(self) -> int:
        return self.whole().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.whole().untyped_storage()


class GradientShards:
    """The gradients of one unit of parameters.

    Args:
        buffer: where the parameters lie.
        shard_group: the ranks.
    """

    def __init__(self, buffer: FlatBuffer, shard_group: ShardGroup) -> None:
        self.buffer, self.params, self.shard_group = buffer, buffer.params, shard_group
        first = buffer.params[0]
        self.dtype = first.dtype
        self.shard = torch.zeros(buffer.layout.region, dtype=first.dtype, device=first.device)
        self._ranges = buffer.owned_ranges()
        # Made once: a view that is made while torch dispatches has a version of its own.
        self._pieces = [self.shard[start : start + numel] for start, numel, _ in self._ranges]
        self.proxies: list[torch.Tensor] = [self._proxy(i) for i in range(len(self.params))]
        self.core = core.ShardedGradients(
            self.shard, self.params, self.proxies, weakly(self.release)
        )

    def version(self) -> int:
        """Return a number that changes whenever the averages do."""
        return self.shard._version

    def shares(self) -> list[Share]:
        """Return this rank's share of each member's gradient."""
        return [proxy.share for proxy in self.proxies if isinstance(proxy, ShardedGradient)]

    def _proxy(self, index: int) -> ShardedGradient:
        share = Share(self, index, self._pieces[index], self._ranges[index][2])
        return ShardedGradient(self.params[index], share)

    def release(self, index: int) -> None:
        """Give the member's values to a new proxy; the old proxy keeps a copy of them."""
        self.shares()[index].release()
        self._renew(index)

    def replace(self, index: int, whole: torch.Tensor) -> None:
        """Make this tensor the member's gradient from now on."""
        param, proxy = self.params[index], self.proxies[index]
        if param.grad is proxy:
            param.grad = whole
        dtensor = self.shard_group.dtensors.get(id(param))
        if dtensor is not None and dtensor.grad is not None and local_part(dtensor.grad) is proxy:
            set_local(dtensor.grad, whole)
        self.core.set_pending(index, None)
        self._renew(index)

    def _renew(self, index: int) -> None:
        self.proxies[index] = self._proxy(index)
        self.core.set_proxy(index, self.proxies[index])

    def collect(self, share: Share) -> torch.Tensor:
        """Return all averages of one member, from all ranks. Collective.

        Bytes are summed, of which only their owner's are not zero, so they arrive as they are.
        """
        param = self.params[share.index]
        exchange = self.shard_group.exchange
        exchange.meet(f"the gradient of '{exchange.name_of(param)}'")
        whole = torch.zeros_like(param)  # in the same order in memory
        flat = whole.as_strided((whole.numel(),), (1,))
        flat[share.begin : share.begin + share.piece.numel()] = share.piece
        exchange.reduce(flat.view(torch.uint8), "the gathering of a gradient")
        return whole


def gather_foreign(buffer: FlatBuffer) -> None:
    """Make gradients whole that another optimizer, or another wrapper, has cut differently.

    Collective where there are any, which all ranks see alike.
    """
    for param in buffer.params:
        grad = param.grad
        if isinstance(grad, ShardedGradient) and grad.share.whole is None:
            other = grad.share.shards().buffer
            if other is not buffer and (
                other.layout != buffer.layout
                or any(a is not b for a, b in zip(other.params, buffer.params, strict=True))
            ):
                param.grad = grad.share.make_whole()


def lend_gradients(buffer: FlatBuffer) -> None:
    """Give each piece that this rank owns the elements of its parameter's gradient."""
    for piece, tensor in buffer.owned.items():
        grad = buffer.params[piece.param].grad
        if isinstance(grad, ShardedGradient) and grad.share.whole is not None:
            grad = grad.share.whole
        if isinstance(grad, ShardedGradient):
            mine = grad.share.owned()
            grad = mine.as_strided(tensor.shape, tensor.stride(), mine.storage_offset())
        elif grad is not None:
            grad = buffer.cut(piece, grad)
        tensor.grad = None if grad is None else grad.to(tensor.dtype)


def make_whole(params: Iterable[torch.Tensor]) -> None:
    """Put plain tensors into `param.grad` again. Collective where a proxy was there."""
    for param in params:
        if isinstance(param.grad, ShardedGradient):
            param.grad = param.grad.share.make_whole()


_on = ShardedGradient.handles


def _changed(proxies: Sequence[ShardedGradient]) -> None:
    """Note averages that were written here, where torch does not count that."""
    increment_version([proxy.share.piece for proxy in proxies])


def _is_average(grad: object) -> bool:
    """Return whether it is a gradient that is spread, with nothing beside it."""
    return isinstance(grad, ShardedGradient) and grad.share.is_average


def _piece(grad: torch.Tensor) -> torch.Tensor:
    """Return what an operator on each element works on: of a gradient that is spread this rank's
    elements, of another one all.

    Lists of gradients may differ between ranks, as where only some have used an expert.
    """
    if not isinstance(grad, ShardedGradient):
        return grad
    return grad.share.piece if grad.share.is_average else grad.whole()


@_on("detach.default", "alias.default")
def _detach(func: Any, proxy: ShardedGradient) -> ShardedGradient:
    return ShardedGradient(proxy, proxy.share)


@_on("zero_.default")
def _zero(func: Any, proxy: ShardedGradient) -> Any:
    if proxy.share.whole is not None:
        return NotImplemented
    proxy.share.pending = None
    proxy.share.piece.zero_()
    _changed([proxy])
    return proxy


@_on("_foreach_zero_.default")
def _zero_all(func: Any, proxies: Sequence[torch.Tensor]) -> None:
    for proxy in proxies:
        proxy.zero_()


@_on("add_.Tensor")
def _accumulate(func: Any, proxy: Any, other: torch.Tensor, *, alpha: float = 1) -> Any:
    """Accumulate as autograd does into a gradient that it finds; what a
    script adds counts alike.
    """
    if not isinstance(proxy, ShardedGradient) or isinstance(other, ShardedGradient):
        return NotImplemented
    share = proxy.share
    if share.whole is not None or other.shape != proxy.shape or other.dtype is not proxy.dtype:
        return NotImplemented
    share.add(other if alpha == 1 else other * alpha)
    return proxy


@_on(
    "mul_.Tensor",
    "mul_.Scalar",
    "div_.Tensor",
    "div_.Scalar",
    "clamp_.default",
    "clamp_min_.default",
    "clamp_max_.default",
    "nan_to_num_.default",
)
def _elementwise(func: Any, proxy: Any, *others: Any, **named: Any) -> Any:
    if not _is_average(proxy) or not all(map(ShardedGradient.is_number, others)):
        return NotImplemented
    func(proxy.share.piece, *others, **named)
    _changed([proxy])
    return proxy


@_on(
    "_foreach_mul_.Scalar",
    "_foreach_mul_.Tensor",
    "_foreach_div_.Scalar",
    "_foreach_div_.Tensor",
    "_foreach_clamp_min_.Scalar",
    "_foreach_clamp_max_.Scalar",
)
def _elementwise_all(func: Any, grads: Sequence[Any], other: Any) -> Any:
    if not ShardedGradient.is_number(other):
        return NotImplemented
    averages = list(filter(_is_average, grads))
    func([_piece(grad) for grad in grads], other)
    _changed(averages)
    return None


@_on("linalg_vector_norm.default")
def _norm(
    func: Any,
    proxy: Any,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    known = _is_average(proxy) and not proxy.share.released and ord > 0
    if not known or dim is not None or keepdim:
        return NotImplemented
    norm = proxy.share.shards().shard_group.norm(proxy.share, float(ord))
    return norm if dtype is None else norm.to(dtype)


@_on("_foreach_norm.Scalar")
def _norms(
    func: Any, proxies: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None
) -> Any:
    return [torch.linalg.vector_norm(proxy, ord, dtype=dtype) for proxy in proxies]


@_on("_amp_foreach_non_finite_check_and_unscale_.default")
def _unscale(
    func: Any, grads: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> Any:
    averages = list(filter(_is_average, grads))
    if not averages:
        return NotImplemented
    shard_group = averages[0].share.shards().shard_group
    shard_group.exchange.meet("gradients to be unscaled")
    func([_piece(grad) for grad in grads], found_inf, inv_scale)
    _changed(averages)
    shard_group.exchange.reduce(found_inf, "the search for infinities", dist.ReduceOp.MAX)
    return None


def averages(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter, or the part of it that this rank keeps."""
    pairs = ((param.grad, _spread(param)) for param in params)
    return [grad if spread is None else spread.share.piece for grad, spread in pairs]


def is_spread(params: Sequence[torch.Tensor], index: int) -> bool:
    """Return whether the gradient of a parameter is spread over the ranks."""
    return _spread(params[index]) is not None


def _spread(param: torch.Tensor) -> ShardedGradient | None:
    """Return what stands for a parameter's gradient, or for the local tensor of that."""
    local = None if param.grad is None else local_part(param.grad)
    return local if isinstance(local, ShardedGradient) else None
