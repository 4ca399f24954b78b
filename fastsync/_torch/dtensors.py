"""DTensors made of local tensors without communication or autograd, and their local tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.dlpack import from_dlpack

__all__ = [
    "DTensorSpec",
    "LocalPlace",
    "cut_like",
    "even_numel",
    "is_cut",
    "is_dtensor",
    "local_gradient",
    "local_of",
    "local_part",
    "local_place",
    "local_value",
    "make_dtensor",
    "make_spec",
    "mesh_groups",
    "placed_value",
    "set_local",
    "shard_spec",
    "spec_of",
    "with_dtype",
    "with_own_storage",
]


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], sizes: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a contiguous tensor of these global sizes."""
    stride = torch.empty(tuple(sizes), device="meta").stride()
    meta = TensorMeta(torch.Size(sizes), stride, dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def shard_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], inner: DTensorSpec
) -> DTensorSpec:
    """Return the spec of a DTensor whose local tensors are cut once more, over another mesh.

    Args:
        mesh: the other mesh, which comes first.
        placements: placements of the local tensors there.
        inner: spec of the DTensor.
    """
    whole = DeviceMesh._concatenate([mesh, inner.mesh])
    outer = tuple(_around(each, inner) for each in placements)
    return DTensorSpec(whole, (*outer, *inner.placements), tensor_meta=inner.tensor_meta)


def _around(placement: Placement, inner: DTensorSpec) -> Placement:
    """Say where a dimension was cut by `inner` before."""
    if not isinstance(placement, Shard):
        return placement
    pieces = math.prod(
        inner.mesh.size(dim)
        for dim, each in enumerate(inner.placements)
        if isinstance(each, Shard | _StridedShard) and each.dim == placement.dim
    )
    return placement if pieces == 1 else _StridedShard(placement.dim, split_factor=pieces)


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Mesh, placements, global sizes and dtype of a DTensor."""
    return cast(DTensor, tensor)._spec


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the same spec with another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype)
    )


# Integers of each size: DLPack does not know all dtypes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def with_own_storage(memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, behind a storage that begins there and holds no more.

    A DTensor has the offset of its local tensor. Where that is not 0, pickle and deepcopy believe
    that the DTensor itself has memory, and fail. Besides, torch.save() writes the whole storage of
    a tensor, and libraries take tensors in one storage for tied ones.

    On devices that DLPack does not know the tensor itself is returned.
    """
    if memory.device.type not in ("cpu", "cuda", "meta"):
        return memory
    with torch.no_grad(), torch.inference_mode(False):
        if memory.is_meta or memory.numel() == 0:
            return torch.empty_strided(
                memory.shape, memory.stride(), dtype=memory.dtype, device=memory.device
            )
        bits = _BITS.get(memory.itemsize, memory.dtype)
        own: torch.Tensor = from_dlpack(memory.detach().view(bits))
        return own.view(memory.dtype)


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of which this rank has `local`: the same memory."""
    return DTensor(local, spec, requires_grad=False)


def is_dtensor(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether ranks have different parts of a tensor."""
    return any(group.size() > 1 for group in mesh_groups(tensor, cut=True))


def even_numel(tensor: torch.Tensor) -> int:
    """Return the real elements of a rank's part of a DTensor, if all parts were of one size."""
    spec = spec_of(tensor)
    parts = math.prod(
        size
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True)
        if not placement.is_replicate()
    )
    return -(-tensor.numel() * (2 if tensor.is_complex() else 1) // parts)


def mesh_groups(tensor: torch.Tensor, cut: bool = False) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of a DTensor's mesh, one of each dimension: none of a plain tensor.

    Args:
        cut: leave out those whose ranks all have the same.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    dims = (dim for dim in range(mesh.ndim) if not (cut and placements[dim].is_replicate()))
    return tuple(mesh.get_group(dim) for dim in dims)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself, without autograd."""
    return cast(DTensor, tensor)._local_tensor


class LocalPlace(NamedTuple):
    """The place of a rank's part in a whole tensor.

    Attributes:
        shape, stride: of the part.
        offsets: of its first element.
        writes: of the ranks that have the same part of a DTensor, in its mesh, others do not.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: tuple[int, ...]
    writes: bool = True


def local_place(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> LocalPlace:
    """Return the place of this rank's part of a DTensor; of another tensor, that of all.

    Args:
        group: the ranks that share the part: each of them writes.

    Raises:
        ValueError: the part is in several pieces.
    """
    local = local_part(tensor)
    shape, stride = tuple(local.shape), local.stride()
    if not isinstance(tensor, DTensor):
        return LocalPlace(shape, stride, (0,) * tensor.dim())
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(placement, _StridedShard) for placement in placements):
        raise ValueError(
            f"a DTensor of placements {placements} has parts in several pieces, which cannot be "
            "saved as chunks; save optimizer.state_dict(), or use zero=0"
        )
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    sharers = set(dist.get_process_group_ranks(group))
    writes = all(
        mesh.get_local_rank(dim) == 0
        for dim in range(mesh.ndim)
        if placements[dim].is_replicate()
        and len(sharers.intersection(dist.get_process_group_ranks(mesh.get_group(dim)))) < 2
    )
    return LocalPlace(shape, stride, offsets, writes)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without autograd; another tensor as it is."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def local_value(value: Any, param: torch.Tensor) -> Any:
    """Return this rank's part of a value in the state of a parameter: a number, a whole tensor, or
    a DTensor. Collective where that is placed otherwise than a parameter that is a DTensor.
    """
    if isinstance(value, DTensor):
        return local_gradient(value, spec_of(param)) if isinstance(param, DTensor) else value
    if not (isinstance(param, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    return local_of(cut_like(value, param)) if value.shape == param.shape else value


def placed_value(value: Any, param: torch.Tensor, name: str) -> Any:
    """Return a value in the state of a parameter, of which this rank has its part: as a DTensor
    where the parameter is one, and has the value as a DTensor.
    """
    if not (isinstance(param, DTensor) and isinstance(value, torch.Tensor)):
        return value
    if not value.dim() and (name == "step" or param.dim()):
        return value
    spec = spec_of(param)
    if value.shape == local_of(param).shape:
        return make_dtensor(value, with_dtype(spec, value.dtype))
    if is_cut(param):
        return value
    return make_dtensor(value, make_spec(spec.mesh, spec.placements, value.shape, value.dtype))


def cut_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut a tensor that every rank has whole as a DTensor of the same sizes is: a copy."""
    if isinstance(whole, DTensor):
        return whole
    spec, local = spec_of(like), whole
    # A strided shard cuts what the other dimensions of the mesh have cut.
    order = sorted(
        range(spec.mesh.ndim),
        key=lambda dim: (isinstance(spec.placements[dim], _StridedShard), dim),
    )
    for dim in order:
        placement = spec.placements[dim]
        if isinstance(placement, Shard | _StridedShard):
            parts = local.chunk(spec.mesh.size(dim), placement.dim)
            mine = spec.mesh.get_local_rank(dim)
            local = parts[mine] if mine < len(parts) else local.narrow(placement.dim, 0, 0)
    return make_dtensor(local.detach().clone().contiguous(), with_dtype(spec, whole.dtype))


def local_gradient(gradient: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return the local gradient of a DTensor, placed as the DTensor. Collective where it is not."""
    placed = cast(DTensor, gradient)
    if placed.placements != spec.placements:
        placed = placed.redistribute(placements=spec.placements)
    local: object = placed._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else cast(torch.Tensor, local)


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Give a DTensor another local tensor of the same sizes."""
    cast(DTensor, tensor)._local_tensor = local
