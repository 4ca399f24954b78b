"""Front whose ranks check for faults where those of torch's front would not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastsync.ddp.buffers import broadcast, can_broadcast
from fastsync.ddp.zero_classes import StagedDDP
from fastsync.reducer.monitor import come_together

__all__ = ["CheckedDDP"]


class CheckedDDP(StagedDDP):
    """Meet all ranks before torch's constructor compares and broadcasts.

    Torch cannot look up from waiting there. What a module runs before, such as `named_buffers()`,
    may take long on one rank.
    """

    _meets = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._meets = kwargs.get("init_sync", True)
        super().__init__(*args, **kwargs)
        self._meets = False  # a copy meets no other rank here

    def _build_params_for_reducer(self) -> tuple[list[torch.Tensor], list[bool]]:
        built = super()._build_params_for_reducer()
        if self._meets:
            come_together(self.process_group, "the wrapping of the model")
        return built

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        if can_broadcast(tensors, self.process_group):
            broadcast(tensors, self.process_group, authoritative_rank)
        else:
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)
