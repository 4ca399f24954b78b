"""Every private name of torch that fastsync leans on, and nothing else.

The supported versions of torch differ here or not at all. CI runs this file against the oldest and
the newest of them.
"""

from __future__ import annotations

import bisect
import inspect
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as _front

__all__ = [
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "default_group",
    "find_tensors",
    "front_accepts",
    "gloo_threads",
    "group_store",
    "group_timeout",
    "has_python_reducer",
    "split_graphs_at_buckets",
    "untraced",
]

Fn = TypeVar("Fn", bound=Callable[..., Any])

GradBucket = _c10d.GradBucket
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


def find_tensors(output: Any) -> Iterable[torch.Tensor]:
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


def has_python_reducer() -> bool:
    """Whether torch.compile was told to do DistributedDataParallel's work in Python."""
    from torch._dynamo.utils import get_optimize_ddp_mode

    return get_optimize_ddp_mode() == "python_reducer"


def split_graphs_at_buckets() -> None:
    """Has torch.compile split the graphs of a FastDDP where its buckets end.

    torch's DDPOptimizer counts bytes along the graph. Its heir, put in its place for good, asks
    the module whose forward is being compiled: the method `_graph_buckets` gets the graph's
    parameters in the order of their gradients and returns the groups that are sent together. For
    modules without that method it is what it was.
    """
    from torch._dynamo.backends import distributed as backend

    backend.DDPOptimizer = _graph_splitter()  # type: ignore[misc]


@cache
def _graph_splitter() -> Any:
    # Here, because importing the compiler takes a second.
    from torch._dynamo.backends.distributed import DDPOptimizer

    class GraphSplitter(DDPOptimizer):
        """Splits behind the node that completes a bucket, seen from the end of the forward."""

        def __init__(self, bucket_bytes_cap: int, backend_compile_fn: Any, **options: Any) -> None:
            self._buckets_of = _graph_buckets()
            if self._buckets_of is not None:
                options["first_bucket_cap"] = bucket_bytes_cap
            super().__init__(bucket_bytes_cap, backend_compile_fn, **options)
            self._place: dict[Any, int] = {}  # of each node, counted from the end
            self._ends: list[int] = []  # places that complete a bucket
            self._current: Any = None
            self._passed = self._sent = 0

        def compile_fn(self, gm: Any, example_inputs: Any, **configs: Any) -> Any:
            nodes = list(reversed(gm.graph.nodes))
            self._place = {node: place for place, node in enumerate(nodes)}
            ready = _gradient_places(nodes, self._place)
            if self._buckets_of is not None and ready:
                order = [param for param, _ in ready]
                place = {id(param): place for param, place in ready}
                groups = self._buckets_of(order)
                self._ends = sorted(max(place[id(p)] for p in group) for group in groups)
                self._set_cap(sys.maxsize)
            return super().compile_fn(gm, example_inputs, **configs)

        def add_param_args(self, bucket: Any, node: Any) -> None:
            super().add_param_args(bucket, node)
            if not self._ends:
                return
            if bucket is not self._current:
                self._current, self._sent = bucket, self._passed
            self._passed = bisect.bisect_right(self._ends, self._place[node])
            # A bucket of the graph that has reached its cap is closed at the next node.
            self._set_cap(bucket.size if self._passed > self._sent else sys.maxsize)

        def _set_cap(self, cap: int) -> None:
            self.first_bucket_cap = self.bucket_bytes_cap = cap

    return GraphSplitter


def _graph_buckets() -> Any:
    return getattr(DistributedDataParallel._get_active_ddp_module(), "_graph_buckets", None)


def _gradient_places(nodes: list[Any], place: dict[Any, int]) -> list[tuple[torch.Tensor, int]]:
    """A graph's parameters and where, counted from its end, their gradients are complete.

    That is at their first use. Of several that are complete at once the largest comes last, so
    that a bucket which it fills ends there.
    """
    found = []
    for node in nodes:
        known = node.meta.get("grapharg") if node.op == "placeholder" else None
        param = getattr(known, "example", None)
        if isinstance(param, torch.nn.Parameter) and param.requires_grad and node.users:
            found.append((param, max(place[user] for user in node.users)))
    return sorted(found, key=lambda entry: (entry[1], entry[0].numel()))
