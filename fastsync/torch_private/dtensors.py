"""DTensors made of local tensors without communication or autograd, and their local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

__all__ = ["DTensorSpec", "local_of", "make_dtensor", "make_spec", "set_local"]


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], sizes: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Of a contiguous tensor of these global sizes."""
    stride = torch.empty(tuple(sizes), device="meta").stride()
    meta = TensorMeta(torch.Size(sizes), stride, dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of which this rank has `local`: the same memory."""
    return DTensor(local, spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself, without autograd."""
    return cast(DTensor, tensor)._local_tensor


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Has a DTensor stand for another local tensor of the same sizes."""
    cast(DTensor, tensor)._local_tensor = local
