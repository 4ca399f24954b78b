"""Private parts of torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as _front

__all__ = [
    "BuiltinCommHookType",
    "Front",
    "GradBucket",
    "broadcast_coalesced",
    "builtin_comm_hook",
    "find_tensors",
    "front_accepts",
    "untraced",
]

Fn = TypeVar("Fn", bound=Callable[..., Any])

GradBucket = _c10d.GradBucket
BuiltinCommHookType = _c10d.BuiltinCommHookType

if TYPE_CHECKING:

    class Front(DistributedDataParallel):
        """torch's front with the types of what FastDDP overrides and calls."""

        reducer: Any  # FastDDP puts others in their place
        logger: Any
        mixed_precision: Any

        def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None: ...
        def _pre_forward(self, *inputs: object, **kwargs: object) -> object: ...
        def _run_ddp_forward(self, *inputs: object, **kwargs: object) -> object: ...
        def _post_forward(self, output: object) -> object: ...
        def _sync_buffers(self) -> None: ...
        def _distributed_broadcast_coalesced(
            self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
        ) -> None: ...
        def _build_params_for_reducer(self) -> tuple[list[torch.Tensor], list[bool]]: ...
        def _build_debug_param_to_name_mapping(
            self, parameters: Sequence[torch.Tensor]
        ) -> dict[int, str]: ...
        def _check_sync_bufs_post_fwd(self) -> bool: ...
        def _clear_grad_buffer(self) -> None: ...
        def _sync_final_model(self, is_last_joiner: bool) -> None: ...
        def _check_comm_hook(self, hook: Callable[..., object]) -> None: ...

else:
    Front = DistributedDataParallel

_FRONT_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)


def front_accepts(name: str) -> bool:
    """Return whether this torch's DistributedDataParallel knows the constructor argument `name`."""
    return name in _FRONT_ARGUMENTS


def find_tensors(output: object) -> Iterable[torch.Tensor]:
    """Return all tensors in a forward's output, whatever its structure."""
    if isinstance(output, torch.Tensor):
        return (output,)
    found: Iterable[torch.Tensor] = _front._find_tensors(output)
    return found


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], buffer_size: int, source: int
) -> None:
    """Broadcast the tensors of a rank of `group`, in messages of `buffer_size` bytes."""
    cast(Any, dist)._broadcast_coalesced(group, tensors, buffer_size, source)


def builtin_comm_hook(kind: BuiltinCommHookType) -> Callable[..., Any]:
    """The Python twin of a hook that torch has built into its own reducer."""
    hooks = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return hooks[kind]


def untraced(fn: Fn) -> Fn:
    """Keep torch.compile out of `fn` and of all that it calls; import no compiler until then."""
    return cast(Fn, cast(Any, torch)._disable_dynamo(fn))
