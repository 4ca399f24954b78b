"""Tensors inside the arguments and results of a forward: nested in containers and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch

__all__ = ["grad_tensors", "map_tensors"]

T = TypeVar("T")


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], nested: T) -> T:
    """`nested` with every tensor replaced; whatever holds none stays the same object."""
    return cast(T, _mapped(fn, nested))


def _mapped(fn: Callable[[torch.Tensor], torch.Tensor], nested: object) -> object:
    if isinstance(nested, torch.Tensor):
        return fn(nested)
    if isinstance(nested, Mapping):
        return _mapped_mapping(fn, nested)
    if isinstance(nested, list | tuple | set):
        parts = [_mapped(fn, part) for part in nested]
        if all(a is b for a, b in zip(parts, nested, strict=True)):
            return nested
        if isinstance(nested, tuple) and hasattr(nested, "_fields"):
            return cast("Callable[..., object]", type(nested))(*parts)
        return type(nested)(parts)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        return _mapped_dataclass(fn, nested)
    return nested


def _mapped_mapping(
    fn: Callable[[torch.Tensor], torch.Tensor], nested: Mapping[object, object]
) -> object:
    parts = {key: _mapped(fn, part) for key, part in nested.items()}
    changed = {key: part for key, part in parts.items() if part is not nested[key]}
    if not changed:
        return nested
    if type(nested) is dict:
        return parts
    made = type(nested)(nested)  # type: ignore[call-arg]  # a library's own dictionary
    for key, part in changed.items():
        made[key] = part  # type: ignore[index]
    return made


def _mapped_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], nested: object) -> object:
    names = [f.name for f in dataclasses.fields(nested)]  # type: ignore[arg-type]
    parts = {name: _mapped(fn, getattr(nested, name)) for name in names}
    changed = {name: part for name, part in parts.items() if part is not getattr(nested, name)}
    if not changed:
        return nested
    made = copy.copy(nested)
    for name, part in changed.items():
        object.__setattr__(made, name, part)
    return made


def grad_tensors(nested: object) -> list[torch.Tensor]:
    """Those that require a gradient, in the order in which `map_tensors` meets them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    _mapped(note, nested)
    return found
