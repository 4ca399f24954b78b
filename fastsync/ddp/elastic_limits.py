"""Features that cannot recover from a death, so that elastic training refuses them."""

from __future__ import annotations

import weakref
from functools import cache

from torch import nn

from fastsync._build.env import NCCL_LETS_LIVE, Env
from fastsync._torch import default_group, group_store, is_gloo, renewed_backend
from fastsync.faults.stores import served_at
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import watch_of

__all__ = ["unfit"]


def unfit(module: nn.Module, engine: Engine, delays: bool, broadcasts: bool) -> list[str]:
    """Return what of model and ranks cannot be survived, with the remedy.

    Args:
        delays: torch's front reduces gradients itself.
        broadcasts: rank 0 broadcasts its buffers before each forward.
    """
    layers = [n for n, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    found = {
        f"SyncBatchNorm, as layer {layers[:1]} is: its forward waits for all ranks; use "
        "BatchNorm": bool(layers),
        "buffers that rank 0 broadcasts before each forward; pass broadcast_buffers=False, and "
        "each rank keeps its own": broadcasts,
        "delay_all_reduce_named_params, whose all-reduce is torch's own; leave it out": delays,
        "sparse gradients; use Embedding(sparse=False)": any(p.sparse for p in engine.params),
    }
    if engine.group.size() > 1:
        found |= _unfit_group(engine)
    refused = [what for what, is_there in found.items() if is_there]
    if not refused and not is_gloo(engine.group):
        _over_nccl().add(engine)
    return refused


def _unfit_group(engine: Engine) -> dict[str, bool]:
    group = engine.group
    store = group_store(group)
    registered = store is not None
    found = {
        "a process group that torch.distributed did not make; use one of init_process_group() "
        "or new_group()": not registered,
        "a rendezvous store that is no TCP store, as with init_method='file://...': a rank that "
        "dies in a record of a file leaves the others waiting; use 'env://' or 'tcp://...'": (
            store is not None and served_at(store) is None
        ),
        "a process group whose CPU tensors Gloo does not carry; call init_process_group('gloo'), "
        "or with 'cpu:gloo,cuda:nccl'": registered and renewed_backend(group) is None,
        "ranks that do not look out for each other: leave FASTSYNC_WATCH unset, and see that "
        "they can reach each other": registered and watch_of(group) is None,
    }
    return found if is_gloo(group) or not registered else found | _unfit_nccl(engine)


@cache
def _over_nccl() -> weakref.WeakSet[Engine]:
    """Return the engines of this process that train over NCCL."""
    return weakref.WeakSet()


def _unfit_nccl(engine: Engine) -> dict[str, bool]:
    kills, bound = not Env.read().nccl_lets_live, default_group().bound_device_id is not None
    settings = " and ".join(f"{name}={value}" for name, value in NCCL_LETS_LIVE.items())
    return {
        f"NCCL while torch ends a process in which a collective fails: set {settings} before the "
        "process group is made, as `python -m fastsync.elastic` does": kills,
        "a process group of NCCL that is bound to a device, as torch makes others by splitting "
        "it; leave device_id out of init_process_group()": bound,
        "a second model over NCCL, whose communicator cannot be aborted while that of the other "
        "waits; use Gloo": any(other is not engine for other in _over_nccl()),
    }
