"""Tensors whose operations Python makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["WrapperTensor", "map_tensors"]

T = TypeVar("T", bound="WrapperTensor")


class WrapperTensor(torch.Tensor):
    """A tensor without memory. A subclass defines `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def without_memory(cls: type[T], like: torch.Tensor) -> T:
        """One with the sizes, strides, dtype and device of `like`."""
        made: T = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return made


def map_tensors(kind: type[T], change: Callable[[T], object], nested: Any) -> Any:
    """`nested` arguments with every tensor of this class replaced."""
    return tree_map_only(kind, change, nested)
