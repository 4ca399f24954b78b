"""How torch.compile splits graphs of a DistributedDataParallel, and how those of a FastDDP."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "at_end_of_backward",
    "backward_is_running",
    "has_python_reducer",
    "outside_transforms",
    "split_graphs_at_buckets",
    "transforms_are_active",
    "without_modes",
]


def without_modes() -> AbstractContextManager[object]:
    """Hide what is called inside from the dispatch modes that a user has entered."""
    return _disable_current_modes()


def transforms_are_active() -> bool:
    """Return whether this runs inside of a function that torch.func transforms: jvp, vmap, grad."""
    return torch._C._are_functorch_transforms_active()


def outside_transforms() -> AbstractContextManager[object]:
    """Hide what is called inside from the transforms of torch.func."""
    return torch._C._DisableFuncTorch() if transforms_are_active() else nullcontext()


def backward_is_running() -> bool:
    """Return whether this thread is inside a backward: in a hook, or in a callback at its end."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Let the running backward call `fn` when it has done everything else."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(fn)


def has_python_reducer() -> bool:
    """Return whether torch.compile was told to do DistributedDataParallel's work in Python."""
    from torch._dynamo.utils import get_optimize_ddp_mode

    return get_optimize_ddp_mode() == "python_reducer"


def split_graphs_at_buckets() -> None:
    """Make torch.compile split the graphs of a FastDDP where its buckets end.

    torch's DDPOptimizer counts bytes along the graph. A subclass that replaces it for good asks the
    module whose forward is being compiled: the method `_graph_buckets` gets the graph's parameters
    in the order of their gradients and returns the groups that are sent together. Modules without
    that method are split as before.
    """
    from torch._dynamo.backends import distributed as backend

    backend.DDPOptimizer = _graph_splitter()  # type: ignore[misc]


@cache
def _graph_splitter() -> Any:
    # Here, because importing the compiler takes a second.
    from torch._dynamo.backends.distributed import DDPOptimizer

    class GraphSplitter(DDPOptimizer):
        """Splits after the node that completes a bucket, seen from the end of the forward."""

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
