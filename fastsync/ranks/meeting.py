"""A meeting point for all ranks with a deadline, which can say who did not come.

A collective that some rank never enters hangs until the backend's timeout, half an hour by default.
Where ranks have to change course together, they first meet here, through the rendezvous store.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from fastsync.torch_private import group_store

__all__ = ["meet"]


def meet(group: dist.ProcessGroup, place: str, reason: str, timeout: float) -> None:
    """Returns once every rank of `group` has called it with the same `place`.

    Args:
        place: names this meeting; equal on all ranks and never used before in this group.
        reason: what the ranks meet for, as it should read in the error.
        timeout: seconds to wait.

    Raises:
        RuntimeError: not all ranks came in time; names those that did not.
    """
    world, rank = group.size(), group.rank()
    store = group_store(group)
    if world == 1 or store is None:
        return
    prefix = f"fastsync/{group.group_name}/{place}"
    store.set(f"{prefix}/{rank}", "here")
    if store.add(f"{prefix}/count", 1) == world:
        store.set(f"{prefix}/all", "here")
    try:
        store.wait([f"{prefix}/all"], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        absent = [r for r in range(world) if not store.check([f"{prefix}/{r}"])]
        raise RuntimeError(
            f"rank {rank} waited {timeout:g} s for {reason}, but ranks {absent} did not come. "
            "Every rank has to make that change before the same forward"
        ) from error
