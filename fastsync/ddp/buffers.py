"""When a module's buffers have to be broadcast, how, and what torch's front is told about them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import nn

from fastsync._torch import flatten, front_accepts, unflatten
from fastsync.reducer.monitor import looks_out, watched


class BufferWatch:
    """Record of whether a forward may have changed buffers since they were last broadcast.

    All ranks go forward together, and evaluate and train together. So each knows by itself what the
    others know.

    Attributes:
        stale: ranks may hold different buffers.
    """

    def __init__(self) -> None:
        self.stale = True

    def after_forward(self, module: nn.Module) -> None:
        """Note a forward: only a part in training mode changes its buffers."""
        self.stale = self.stale or any(
            part.training and next(part.buffers(recurse=False), None) is not None
            for part in module.modules()
        )


def by_group(
    buffers: Sequence[torch.Tensor],
    module: nn.Module,
    groups: Sequence[tuple[dist.ProcessGroup, Collection[str]]],
    rest: dist.ProcessGroup,
) -> Iterator[tuple[dist.ProcessGroup, Sequence[torch.Tensor]]]:
    """Yield the buffers of each group, in the same order on all ranks; `rest` has the others."""
    if not groups:
        yield rest, buffers
        return
    owner = {name: group for group, names in groups for name in names}
    group_of = {id(b): owner[name] for name, b in module.named_buffers() if name in owner}
    for group in dict.fromkeys((rest, *(group for group, _ in groups))):
        its = [b for b in buffers if group_of.get(id(b), rest) is group]
        if its:
            yield group, its


def can_broadcast(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Return whether `broadcast` is for them; otherwise torch broadcasts, and cannot check for
    faults.
    """
    plain = all(type(b) is torch.Tensor and b.is_cpu and not b.is_complex() for b in buffers)
    return plain and looks_out(group)


@torch.no_grad()
def broadcast(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Broadcast the tensors of `source` to all ranks, bit by bit, in one message. Collective.

    Raises:
        SyncFault: a rank has ended.
    """
    if not any(buffer.numel() for buffer in buffers):
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in sorted(buffers, key=lambda b: -b.element_size()):  # so that all are aligned
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    flat = [flatten(alike).view(torch.uint8) for alike in by_dtype.values()]
    bits = torch.cat(flat)
    start = partial(dist.broadcast, bits, group=group, group_src=source, async_op=True)
    watched(group, f"the broadcast of rank {source}'s buffers", start)
    if group.rank() != source:
        parts = bits.split([part.numel() for part in flat])
        for part, (dtype, alike) in zip(parts, by_dtype.items(), strict=True):
            torch._foreach_copy_(alike, unflatten(part.view(dtype), alike))


class BufferArguments(TypedDict, total=False):
    """DistributedDataParallel's; only newer versions of torch know the second one."""

    broadcast_buffers: bool | None
    forward_sync_buffers: bool | None


def buffer_arguments(broadcast: bool | None, forward_sync: bool | None) -> BufferArguments:
    """The arguments about buffers, in the form that this torch's front takes."""
    if front_accepts("forward_sync_buffers"):
        return {"broadcast_buffers": broadcast, "forward_sync_buffers": forward_sync}
    # There, one switch rules both the initial broadcast, which always takes place where
    # forward_sync_buffers is given, and those at each forward.
    return {
        "broadcast_buffers": True if broadcast is None or forward_sync is not None else broadcast
    }
