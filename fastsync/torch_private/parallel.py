"""What torch's DistributedDataParallel keeps to itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch._C import _distributed_c10d as _c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as _front

__all__ = [
    "GradBucket",
    "builtin_comm_hook",
    "find_tensors",
    "front_accepts",
    "untraced",
]

Fn = TypeVar("Fn", bound=Callable[..., Any])

GradBucket = _c10d.GradBucket
_FRONT_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)


def front_accepts(name: str) -> bool:
    """Whether this torch's DistributedDataParallel knows the constructor argument `name`."""
    return name in _FRONT_ARGUMENTS


def find_tensors(output: Any) -> Iterable[torch.Tensor]:
    """All tensors in a forward's output, whatever its structure."""
    if isinstance(output, torch.Tensor):
        return (output,)
    found: Iterable[torch.Tensor] = _front._find_tensors(output)
    return found


def builtin_comm_hook(kind: Any) -> Callable[..., Any]:
    """The Python twin of a hook that torch has built into its own reducer."""
    hooks = {
        _c10d.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        _c10d.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return hooks[kind]


def untraced(fn: Fn) -> Fn:
    """Keeps torch.compile out of `fn` and of all that it calls; imports no compiler until then."""
    return cast(Fn, cast(Any, torch)._disable_dynamo(fn))
