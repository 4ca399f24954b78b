"""torch's process groups and stores, and what its DistributedDataParallel keeps to itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as _front

__all__ = [
    "BuiltinCommHookType",
    "Front",
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "builtin_comm_hook",
    "default_group",
    "find_tensors",
    "front_accepts",
    "gloo_threads",
    "group_store",
    "group_timeout",
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
        def _check_sync_bufs_post_fwd(self) -> bool: ...
        def _clear_grad_buffer(self) -> None: ...
        def _sync_final_model(self, is_last_joiner: bool) -> None: ...
        def _check_comm_hook(self, hook: Callable[..., object]) -> None: ...

else:
    Front = DistributedDataParallel

_FRONT_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)


def front_accepts(name: str) -> bool:
    """Whether this torch's DistributedDataParallel knows the constructor argument `name`."""
    return name in _FRONT_ARGUMENTS


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        RuntimeError: there is none; carries the remedy.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "FastDDP needs a process group: call torch.distributed.init_process_group() first, and "
            "start the script with torchrun (or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)"
        )
    return distributed_c10d._get_default_group()


def group_store(group: dist.ProcessGroup) -> Store | None:
    """The rendezvous store that `group` was made with."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives of `group` may take; None where its backend does not tell."""
    try:
        backend = cast(Any, group)._get_backend(torch.device("cpu"))
        timeout: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def find_tensors(output: object) -> Iterable[torch.Tensor]:
    """All tensors in a forward's output, whatever its structure."""
    if isinstance(output, torch.Tensor):
        return (output,)
    found: Iterable[torch.Tensor] = _front._find_tensors(output)
    return found


def gloo_threads(group: dist.ProcessGroup) -> int:
    """Threads of a Gloo group; -1 where it is another, or wrapped for debugging."""
    try:
        return int(cast(Any, group)._get_backend(torch.device("cpu")).options._threads)
    except (AttributeError, RuntimeError):
        return -1


def builtin_comm_hook(kind: BuiltinCommHookType) -> Callable[..., Any]:
    """The Python twin of a hook that torch has built into its own reducer."""
    hooks = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return hooks[kind]


def untraced(fn: Fn) -> Fn:
    """Keeps torch.compile out of `fn` and of all that it calls; imports no compiler until then."""
    return cast(Fn, cast(Any, torch)._disable_dynamo(fn))
