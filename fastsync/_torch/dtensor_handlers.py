"""Operators that DTensors shall make as an unsharded tensor would, or not at all.

Torch's own way is another one without a word: each rank draws numbers for its part, `item()` reads
one rank's part of a sum, what is written into `p[0]` is lost, and a rank whose part is empty
raises alone where an operator needs an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastsync._torch.dtensors import cut_like, is_dtensor, local_of, spec_of
from fastsync._torch.tensors import storage_address

__all__ = ["act_as_unsharded"]

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_Registered: TypeAlias = Callable[[Any, _Args, _Kwargs], object]
_ByTorch: TypeAlias = Callable[[], object]
_Handler: TypeAlias = Callable[[_ByTorch, Any, _Args, _Kwargs], object]

_READ = torch.ops.aten._local_scalar_dense.default  # item(), float() and the like
_NORM = torch.ops.aten.linalg_vector_norm.default
_NORMS = torch.ops.aten._foreach_norm.Scalar
_EXTREMES = tuple(getattr(torch.ops.aten, name).default for name in ("amax", "amin", "max", "min"))
_FILL = torch.ops.aten.fill_.Tensor  # p[0] = 1.0, for which torch has no strategy

# Operators whose random numbers depend on nothing but a tensor's sizes.
_DRAWS = (
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.normal_.default,
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.uniform_.default,
)

# Operators that change a tensor's form and no elements.
_FORMS = frozenset(
    f"{name}_"
    for name in (
        *("as_strided", "detach", "requires_grad", "resize", "resize_as", "set", "squeeze"),
        *("swapaxes", "swapdims", "t", "transpose", "unsqueeze"),
    )
)


def act_as_unsharded() -> None:
    """Have all DTensors of this process draw, read and write as this module says."""
    if _READ not in _registered():
        _handle(_DRAWS, _draw)
        _handle([_READ], _read)
        _handle([_NORM], _norm)
        _handle([_NORMS], _norms)
        _handle(_EXTREMES, _extreme)
        _handle([_FILL], _fill)
        _handle(_in_place_operators(), _write)


def _registered() -> dict[object, _Registered]:
    """Return torch's own table of such operators, by operator."""
    return cast("dict[object, _Registered]", DTensor._op_dispatcher._custom_op_handlers)


def _handle(ops: Iterable[Any], handler: _Handler) -> None:
    """Have `handler` make operators of DTensors for which there is none yet.

    It is called with a function that lets torch make the operator, and with what that is given.
    """
    registered = _registered()

    def handled(op: Any, args: _Args, kwargs: _Kwargs) -> object:
        def by_torch() -> object:
            registered.pop(op, None)  # another thread may have done so
            try:
                return op(*args, **kwargs)
            finally:
                registered[op] = handled

        return handler(by_torch, op, args, kwargs)

    for op in ops:
        registered.setdefault(op, handled)


def _draw(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    """Draw numbers for the whole tensor, and keep this rank's.

    On CPUs each rank would draw from its own generator: equal seeds give all parts the same
    numbers, and parts of unequal sizes leave the generators apart. On other devices DTensors make
    generators agree themselves.
    """
    tensor, local, spec = args[0], local_of(args[0]), spec_of(args[0])
    if op._schema.is_mutable:
        _check_write(op, tensor)
    if local.device.type != "cpu" or any(p.is_partial() for p in spec.placements):
        return by_torch()
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype)
    drawn = cut_like(op(whole, *args[1:], **kwargs), tensor)
    if not op._schema.is_mutable:
        return drawn
    local.copy_(local_of(drawn))
    return tensor


def _read(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    """Read the number that all ranks' parts make up. Collective, unless this rank has all."""
    return op(cast(DTensor, args[0]).full_tensor(), **kwargs)


def _norm(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    """Give all ranks the norm of norms, as of all gradients, so that each may read it alone."""
    extreme = math.isinf(_order(args))
    norm = cast(DTensor, _extreme(by_torch, op, args, kwargs) if extreme else by_torch())
    if any(placement.is_partial() for placement in args[0].placements):
        return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)
    return norm


def _norms(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    """Compute one norm after the other, where a part without elements has none."""
    if math.isinf(_order(args)) and any(map(_is_empty_somewhere, args[0])):
        return [torch.linalg.vector_norm(each, *args[1:], **kwargs) for each in args[0]]
    return by_torch()


def _order(args: _Args) -> float:
    return float(args[1]) if len(args) > 1 else 2.0


def _extreme(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    """Let all ranks look at all elements, where some have none. Collective."""
    tensor = cast(DTensor, args[0])
    if not _is_empty_somewhere(tensor):
        return by_torch()
    found = op(tensor.full_tensor(), *args[1:], **kwargs)
    return DTensor.from_local(found, tensor.device_mesh, run_check=False)


def _is_empty_somewhere(tensor: torch.Tensor) -> bool:
    """Return whether the last rank's part, which is the smallest, has no elements."""
    if not isinstance(tensor, DTensor) or tensor.numel() == 0:
        return False
    sizes = list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if not (placement.is_replicate() or placement.is_partial()):
            dim, ranks = cast(Shard, placement).dim, tensor.device_mesh.size(axis)
            sizes[dim] = max(0, sizes[dim] - math.ceil(sizes[dim] / ranks) * (ranks - 1))
    return 0 in sizes


def _write(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    _check_write(op, args[0])
    return by_torch()


def _fill(by_torch: _ByTorch, op: Any, args: _Args, kwargs: _Kwargs) -> object:
    """Fill this rank's part with the number that all ranks have, unless parts are summands."""
    target, number = cast("tuple[torch.Tensor, torch.Tensor]", args)
    _check_write(op, target)
    if not is_dtensor(target) or any(each.is_partial() for each in spec_of(target).placements):
        return by_torch()
    local_of(target).fill_(number.full_tensor() if isinstance(number, DTensor) else number)
    return target


def _check_write(op: Any, target: torch.Tensor) -> None:
    """Check that what is written to is a part of the local tensor, if it is a view.

    A view along a dimension that is sharded is collected from all ranks.

    Raises:
        RuntimeError: it is such a copy.
    """
    base = target._base
    if base is None or not (is_dtensor(base) and is_dtensor(target)):
        return
    addresses = {storage_address(local_of(each)) for each in (base, target)}
    if len(addresses) > 1:
        raise RuntimeError(
            f"{op} writes into a part of a DTensor, such as p[0] or p.view(-1), of which other "
            "ranks have some: that part is a copy, and the DTensor would keep its values. Write "
            "into all of it, as with p.mul_(mask) or p.copy_(values), where mask and values are "
            "DTensors or come from torch.distributed.tensor.distribute_tensor(); or use zero=2"
        )


def _in_place_operators() -> Iterator[Any]:
    """Yield torch's operators that write to elements of their first argument."""
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space != "aten" or not name.endswith("_") or name.startswith("_") or name in _FORMS:
            continue
        first = schema.arguments[0].alias_info if schema.arguments else None
        if first is not None and first.is_write:
            yield getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
