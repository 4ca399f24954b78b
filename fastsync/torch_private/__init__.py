"""Every private name of torch that fastsync leans on, and nothing else.

The supported versions of torch differ here or not at all. CI runs this package against the oldest
and the newest of them.
"""

from fastsync.torch_private.graphs import has_python_reducer, split_graphs_at_buckets
from fastsync.torch_private.parallel import (
    BuiltinCommHookType,
    Front,
    GradBucket,
    PrefixStore,
    Store,
    TCPStore,
    builtin_comm_hook,
    default_group,
    find_tensors,
    front_accepts,
    gloo_threads,
    group_store,
    group_timeout,
    untraced,
)

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
    "has_python_reducer",
    "split_graphs_at_buckets",
    "untraced",
]
