"""Tensors whose operations Python makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import _utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

__all__ = [
    "WrapperTensor",
    "accumulate_hooks",
    "creation_number",
    "data_of",
    "flatten",
    "has_views",
    "is_view_of_argument",
    "is_wrapper",
    "next_creation_number",
    "set_data",
    "share_hooks",
    "storage_address",
    "taking_hooks",
    "tensor_hooks",
    "tree_map_only",
    "unflatten",
    "written_arguments",
]

T = TypeVar("T", bound="WrapperTensor")


class WrapperTensor(torch.Tensor):
    """A tensor without memory, whose operators are those that a subclass handles."""

    _handlers: ClassVar[dict[Any, Callable[..., Any]]]  # of each subclass, by operator

    @classmethod
    def handles(cls, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register what makes these operators of `aten`, as far as this version of torch has them.

        Args:
            names: with their overloads, such as "add_.Tensor".
        """

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            for name in names:
                operator, overload = name.split(".")
                packet = getattr(torch.ops.aten, operator, None)
                if packet is not None and overload in packet.overloads():
                    cls._handlers[getattr(packet, overload)] = handler
            return handler

        return register

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = cls._handlers.get(func)
        result = NotImplemented if handler is None else handler(func, *args, **kwargs)
        return cls.otherwise(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an operator that has no handler, or arguments that its handler is not for."""
        raise NotImplementedError

    @classmethod
    def without_memory(cls: type[T], like: torch.Tensor, values: torch.Tensor | None = None) -> T:
        """Return one with the sizes and strides of `like`, and dtype and device of `values`, or
        `like`.
        """
        kind = like if values is None else values
        made: T = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=kind.dtype, device=kind.device
        )
        return made


def accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], object]]:
    """Return the hooks of `register_post_accumulate_grad_hook()`, to call
    where autograd does not.
    """
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Return the hooks of `register_hook()`."""
    return list((tensor._backward_hooks or {}).values())


@contextmanager
def taking_hooks(param: torch.Tensor) -> Iterator[None]:
    """Let a parameter take hooks within: torch refuses those of a frozen one, which may be trained
    later.
    """
    trained = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(trained)


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let `target` have the hooks of `source`, whose handles remove them from both."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    found = getattr(source, "_post_accumulate_grad_hooks", None)
    if found:
        target._post_accumulate_grad_hooks = found


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage's C++ object, which a DTensor has one of, too."""
    return int(tensor.untyped_storage()._cdata)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the `.data` that torch.Tensor has, whatever a subclass makes of it."""
    return cast(torch.Tensor, torch.Tensor.data.__get__(tensor))  # type: ignore[attr-defined]


def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Assign to that `.data`."""
    torch.Tensor.data.__set__(tensor, values)  # type: ignore[attr-defined]


def next_creation_number() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def creation_number(node: Any) -> int:
    """Return the number that autograd gave to a node when it made it."""
    return int(node._sequence_nr())


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements of some tensors of one dtype, in a row."""
    flat: torch.Tensor = _utils._flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `flatten` has made, with the sizes of the tensors that it was made of."""
    return list(_utils._unflatten_dense_tensors(flat, like))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of others, which say what they are."""
    return bool(is_traceable_wrapper_subclass(tensor))


def has_views(tensor: torch.Tensor, known: int = 1) -> bool:
    """Return whether more tensors that are alive have the same storage than `known`: this one."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > known + 1  # and `storage`


def is_view_of_argument(func: Any) -> bool:
    """Return whether an operator returns memory of an argument that it does not write to."""
    arguments = func._schema.arguments
    return any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        found += given if isinstance(given, list | tuple) else [given]
    return [each for each in found if isinstance(each, torch.Tensor)]
