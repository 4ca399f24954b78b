"""Tensors inside the arguments and results of a forward: nested in containers and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TypeVar, cast

import torch

T = TypeVar("T")

# Objects that a search for tensors looks at, so that one that leads far away ends.
MOST_VISITS = 1000
# Classes whose attributes are no output, or lead to the whole program.
_OPAQUE = (
    *(str, bytes, int, float),
    torch.nn.Module,
    torch.optim.Optimizer,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], nested: T) -> T:
    """Return `nested` with every tensor replaced; an object that holds none stays the same."""
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
    """Return the tensors that require a gradient, in the order in which
    `map_tensors` meets them.
    """
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    _mapped(note, nested)
    return found


def output_grad_tensors(nested: object) -> list[torch.Tensor]:
    """Return the tensors in an output that require a gradient, in objects of any class, too."""
    found = grad_tensors(nested)
    return found if isinstance(nested, torch.Tensor) else found + _hidden(nested, found)


def _hidden(nested: object, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that `map_tensors` does not meet: attributes of objects, in any depth."""
    found: list[torch.Tensor] = []
    seen = set(map(id, known))
    left, visits = [nested], 0
    while left and visits < MOST_VISITS:
        each = left.pop()
        visits += 1
        if id(each) in seen:
            continue
        if not isinstance(each, torch.Tensor):
            parts = list(_parts(each))
            if parts:
                seen.add(id(each))
                left += parts[::-1]
        elif each.requires_grad:
            seen.add(id(each))
            found.append(each)
    return found


def _parts(nested: object) -> Iterable[object]:
    """Yield what a container or an object holds."""
    if nested is None or isinstance(nested, _OPAQUE):
        return
    if isinstance(nested, Mapping):
        yield from nested.values()
    elif isinstance(nested, list | tuple | set | frozenset):
        yield from nested
    yield from getattr(nested, "__dict__", {}).values()
    for kind in type(nested).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield getattr(nested, name, None)
