"""torch's process groups and their stores, registered with torch.distributed or not.

Elastic libraries and users make groups that `torch.distributed` knows nothing of: bare or wrapped
ones, and subclasses of `ProcessGroup` written in Python. They have a rank, a size and collectives;
a name, a store and the ranks of the default group only those have that `init_process_group` or
`new_group` made.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

__all__ = [
    "MPI",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_gather_flat",
    "backend_name",
    "break_group",
    "connect_group",
    "connect_store",
    "connecting_alone",
    "cpu_backend",
    "default_group",
    "forget_group",
    "gather_objects",
    "gloo_threads",
    "group_store",
    "group_timeout",
    "is_apart",
    "is_gloo",
    "is_registered",
    "keep_for_good",
    "make_beside",
    "make_group",
    "meet_alone",
    "renewed_backend",
    "resolvable_name",
    "root_store",
    "set_group_timeout",
    "talks_by_gloo",
]

MPI = "fastsync_mpi"  # the backend of fastsync/mpi.py
T = TypeVar("T")
_NUMBERS = ("rank=", "world_size=")

_registry: Any = _distributed_c10d  # torch's stubs name groups by a type of their own


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        ValueError: there is none, as torch's own functions raise; carries the remedy.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group. FastDDP needs a process group: call "
            "torch.distributed.init_process_group() first, and start the script with torchrun (or "
            "set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)"
        )
    return distributed_c10d._get_default_group()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch.distributed made `group`, so that it knows its store and its ranks."""
    return group in distributed_c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> Store | None:
    """The rendezvous store that `group` was made with; None where torch.distributed knows none.

    None for torch's fake groups, too: they have one rank, and a store that keeps nothing.
    """
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None or entry[0] == "fake" else entry[1]


def root_store(store: Store) -> Store:
    """Return the store that `store` is a part of, where another process has named its part
    differently.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def connect_store(host: str, port: int, timeout: timedelta) -> Store:
    """Connect with a store that another process serves.

    Args:
        timeout: for connecting, and for each of its operations.

    Raises:
        RuntimeError: no process serves one there.
    """
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def meet_alone(port: int) -> None:
    """Make `init_process_group` give groups of one rank, where the store is at `port`.

    Whatever RANK and WORLD_SIZE, or the script, say: `env://` and `tcp://` alike. Stores at other
    ports are the script's own.
    """
    # `torch.distributed.rendezvous` is a function that hides its module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = _alone(handlers[scheme], port)


def _alone(handler: Callable[..., Iterator[Any]], port: int) -> Callable[..., Iterator[Any]]:
    def rendezvous(url: str, **options: Any) -> Iterator[Any]:
        parsed = urlparse(url)
        if parsed.scheme == "env" or parsed.port == port:
            parts = [p for p in parsed.query.split("&") if p and not p.startswith(_NUMBERS)]
            parsed = parsed._replace(query="&".join([*parts, "rank=0", "world_size=1"]))
        return handler(parsed.geturl(), **options)

    return rendezvous


def resolvable_name(group: dist.ProcessGroup) -> str:
    """Return the name by which C++ finds `group`, which gets one where it has none.

    C++ does not keep the part of a group that is written in Python alive: the caller that passes on
    the name must keep the group.
    """
    with contextlib.suppress(RuntimeError):
        name: str = group.group_name
        if _registry._resolve_process_group(name) is group:
            return name
    name = f"fastsync/{id(group):x}"
    with contextlib.suppress(RuntimeError):
        if _registry._resolve_process_group(name) is group:
            return name
    _registry._register_process_group(name, group)
    end = weakref.finalize(group, _registry._unregister_process_group, name)
    end.atexit = False
    return name


def make_group(
    store: Store,
    rank: int,
    members: Sequence[int],
    name: str,
    timeout: timedelta,
    backend: str = "gloo",
) -> dist.ProcessGroup:
    """A registered group of some ranks, which needs no others and no group that works.

    Collective of `members`. torch's `new_group` would wait for them without an end.

    Args:
        rank: this one's place among them.
        members: their ranks in the default group, which must not have been destroyed.
        name: that no other group has had on any of them.
        timeout: for connecting, and for each collective until it is given another.
        backend: as `renewed_backend` names it.
    """
    make = cast(Any, distributed_c10d._new_process_group_helper)
    with connecting_alone(members):
        made, _ = make(len(members), rank, list(members), backend, store, name, timeout=timeout)
    group = cast(dist.ProcessGroup, made)
    distributed_c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(members)}
    _apart().add(group)
    return group


@contextlib.contextmanager
def connecting_alone(members: Sequence[int]) -> Iterator[None]:
    """Let a group that is made within connect only its members, without other ranks.

    After `init_process_group(device_id=...)` torch would split the default group's communicator,
    which every rank of that group has to join.

    Args:
        members: their ranks in the default group.
    """
    default: Any = distributed_c10d._world.default_pg
    bound = getattr(default, "bound_device_id", None)
    if bound is None or len(members) == default.size():
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


@cache
def _apart() -> weakref.WeakSet[dist.ProcessGroup]:
    """The groups that `make_group` made."""
    return weakref.WeakSet()


def is_apart(group: dist.ProcessGroup) -> bool:
    """Return whether `make_group` made it.

    torch's `new_group` cannot make another one of its ranks: it would name that by how many groups
    a process has been in, and they have not been in the same ones.
    """
    return group in _apart()


def make_beside(
    group: dist.ProcessGroup, members: Sequence[int], name: str, backend: str
) -> dist.ProcessGroup:
    """Return another group of some ranks of `group`, this one among them. Collective of them.

    torch's `new_group` would name it by the groups that this process has now. Ranks end theirs at
    different times, and what the store holds of a name is that of the first group of that name.

    Args:
        members: ranks in the default group.
        name: that no other group beside `group` has had.
    """
    store, timeout = group_store(group), group_timeout(group)
    assert store is not None and timeout is not None
    me = list(members).index(dist.get_process_group_ranks(group)[group.rank()])
    return make_group(store, me, members, f"{group.group_name}/{name}", timeout, backend)


class _Forgotten:
    """Stands for a forgotten group where torch counts groups: it names later ones by that count,
    and ranks forget theirs at different times.
    """

    def shutdown(self) -> None:
        """End nothing."""

    abort = shutdown


def forget_group(group: dist.ProcessGroup) -> None:
    """Make torch.distributed drop a group, so that it ends with its last user.

    Unlike `destroy_process_group`, this shuts down nothing that is still in use.
    """
    world: Any = distributed_c10d._world
    name = world.pg_names.pop(group, None)
    if name is None:
        return  # all groups have been destroyed
    world.pg_names[_Forgotten()] = name
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for alike in (world.tags_to_pg.pop(tag, []), world.tags_to_pg.get("", [])):
        with contextlib.suppress(ValueError):
            alike.remove(group)
    with contextlib.suppress(RuntimeError):
        _registry._unregister_process_group(name)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Collectives of a group may take so long from now on."""
    for device in cast(Any, group)._device_types:
        cast(Any, group)._get_backend(device)._set_default_timeout(timeout)


def keep_for_good(group: dist.ProcessGroup) -> None:
    """Keep a group until the process ends: its end would wait for collectives
    that may never end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def renewed_backend(group: dist.ProcessGroup) -> str | None:
    """Return the backend for `make_group` to make another group like this one; None if unknown.

    Gloo carries what is on CPUs in each of them.
    """
    carried = _backends(group)
    if carried.get("cpu") != "gloo":
        return None
    others = set(carried.values()) - {"gloo"}
    if not others:
        return "gloo"
    return ",".join(f"{d}:{b}" for d, b in sorted(carried.items())) if others == {"nccl"} else None


def break_group(group: dist.ProcessGroup) -> None:
    """End what is under way in a group of which ranks have died, as far as a backend can.

    NCCL's kernels wait on the device for what the dead should have sent, until they are aborted.
    Gloo's threads wait on the host and do no harm. The group stays until the process ends.

    Raises:
        RuntimeError: NCCL cannot end its kernels within the timeout of the group.
    """
    keep_for_good(group)
    for device, backend in _backends(group).items():
        if backend == "nccl":
            cast(Any, group)._get_backend(torch.device(device)).abort()


def connect_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect `group`, as a backend would in its first collective on `device`. Collective."""
    if _backends(group).get(device.type) == "nccl":
        with torch.cuda.device(device):
            cast(Any, group)._get_backend(device).eager_connect_single_device(device)


def backend_name(group: dist.ProcessGroup) -> str:
    """Return what torch.distributed.get_backend says, or the group's own name if it is unknown
    there.
    """
    if is_registered(group):
        return str(dist.get_backend(group))
    return str(cast(Any, group).name())


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long collectives of `group` may take; None where its backend does not tell."""
    try:
        backend = cast(Any, group)._get_backend(torch.device("cpu"))
        timeout: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends by the types of their devices; empty where a group does not tell.

    `torch.distributed.get_backend` knows only what was asked for, which may be nothing.
    """
    try:
        devices = cast(Any, group)._device_types
        return {d.type: cast(Any, group)._get_backend(d).name() for d in devices}
    except (AttributeError, RuntimeError):
        return {}


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether Gloo, or MPI, which waits on the host as Gloo does, carries all that `group`
    sends.
    """
    return set(_backends(group).values()) in ({"gloo"}, {MPI})


def talks_by_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether Gloo, or MPI, carries what `group` sends from CPUs."""
    return _backends(group).get("cpu") in ("gloo", MPI)


def cpu_backend(group: dist.ProcessGroup) -> str:
    """The backend of another group of the same ranks, for CPU tensors."""
    return MPI if _backends(group).get("cpu") == MPI else "gloo"


def gloo_threads(group: dist.ProcessGroup) -> int:
    """Threads of a Gloo group; -1 where it is another, or wrapped for debugging."""
    try:
        return int(cast(Any, group)._get_backend(torch.device("cpu")).options._threads)
    except (AttributeError, RuntimeError):
        return -1


def gather_objects(mine: T, group: dist.ProcessGroup) -> list[T]:
    """Return what every rank of `group` passes, by rank: anything that can be
    pickled. Collective.
    """
    everyones = [mine] * group.size()  # each replaced by its rank's
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def all_gather_flat(
    gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """Start to fill `gathered` with each rank's `own`, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
    return cast(dist.Work, gather(gathered, own, group=group, async_op=True))
