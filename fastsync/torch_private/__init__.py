"""Every private name of torch that fastsync leans on, and nothing else.

The supported versions of torch differ here or not at all. CI runs this package against the oldest
and the newest of them.
"""

from fastsync.torch_private.callers import caller, caller_level
from fastsync.torch_private.composable import is_replicated, register_sharded
from fastsync.torch_private.dtensors import (
    DTensorSpec,
    local_gradient,
    local_of,
    make_dtensor,
    make_spec,
    set_local,
    shard_spec,
    spec_of,
    with_dtype,
)
from fastsync.torch_private.graphs import (
    at_end_of_backward,
    backward_is_running,
    has_python_reducer,
    outside_transforms,
    split_graphs_at_buckets,
    transforms_are_active,
    without_modes,
)
from fastsync.torch_private.groups import (
    PrefixStore,
    Store,
    TCPStore,
    all_gather_flat,
    backend_name,
    default_group,
    gather_objects,
    gloo_threads,
    group_store,
    group_timeout,
    is_gloo,
    is_registered,
    keep_for_good,
    make_group,
    resolvable_name,
    set_group_timeout,
)
from fastsync.torch_private.optimizers import first_state
from fastsync.torch_private.parallel import (
    BuiltinCommHookType,
    Front,
    GradBucket,
    builtin_comm_hook,
    find_tensors,
    front_accepts,
    untraced,
)
from fastsync.torch_private.tensors import WrapperTensor, accumulate_hooks, is_wrapper, map_tensors

__all__ = [
    "BuiltinCommHookType",
    "DTensorSpec",
    "Front",
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "WrapperTensor",
    "accumulate_hooks",
    "all_gather_flat",
    "at_end_of_backward",
    "backend_name",
    "backward_is_running",
    "builtin_comm_hook",
    "caller",
    "caller_level",
    "default_group",
    "find_tensors",
    "first_state",
    "front_accepts",
    "gather_objects",
    "gloo_threads",
    "group_store",
    "group_timeout",
    "has_python_reducer",
    "is_gloo",
    "is_registered",
    "is_replicated",
    "is_wrapper",
    "keep_for_good",
    "local_gradient",
    "local_of",
    "make_dtensor",
    "make_group",
    "make_spec",
    "map_tensors",
    "outside_transforms",
    "register_sharded",
    "resolvable_name",
    "set_group_timeout",
    "set_local",
    "shard_spec",
    "spec_of",
    "split_graphs_at_buckets",
    "transforms_are_active",
    "untraced",
    "with_dtype",
    "without_modes",
]
