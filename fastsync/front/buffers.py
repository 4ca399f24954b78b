"""When a module's buffers have to be broadcast, and what torch's front is told about them."""

from __future__ import annotations

from typing import TypedDict

from torch import nn

from fastsync.torch_private import front_accepts

__all__ = ["BufferWatch", "buffer_arguments"]


class BufferWatch:
    """Knows whether a forward may have changed buffers since they were last broadcast.

    All ranks go forward together, and evaluate and train together. So each knows by itself what the
    others know.

    Attributes:
        stale: ranks may hold different buffers.
    """

    def __init__(self) -> None:
        self.stale = True

    def after_forward(self, module: nn.Module) -> None:
        """Only a part in training mode changes its buffers in a forward."""
        self.stale = self.stale or any(
            part.training and next(part.buffers(recurse=False), None) is not None
            for part in module.modules()
        )


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
