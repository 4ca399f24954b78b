"""Parts of whole parameters that stay between forward and backward: an equal one on each of few
ranks.

The parts of a small group of ranks make up the whole members, so backward gathers from these ranks
alone, which may be those of one machine.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from fastsync._torch import all_gather_flat
from fastsync.fsdp.group_links import wait_for
from fastsync.reducer import core

__all__ = ["PostForwardShard"]


class PostForwardShard:
    """This rank's part of the memory of whole members.

    Args:
        whole: that memory, one-dimensional.
        group: group whose ranks keep a part each.
    """

    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._group = group
        count = math.ceil(whole.numel() / group.size())
        begin = min(count * group.rank(), whole.numel())
        found = whole[begin : begin + count]
        self._part = whole.new_zeros(count)
        self._part[: found.numel()].copy_(found)
        self._gathered: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._transfer: core.Transfer | None = None

    def start_gather(self, peers: core.UnitPeers, name: core.UnitName) -> None:
        """Start to gather, unless it is under way. Collective.

        Args:
            peers: the object that counts it.
            name: of the unit.
        """
        if self._work is None:
            self._gathered = self._part.new_empty(self._group.size() * self._part.numel())
            sent = (self._group.size() - 1) * self._part.nbytes
            self._transfer = peers.begin(name, "gather", sent)
            self._work = all_gather_flat(self._gathered, self._part, self._group)

    def finish_gather(self) -> torch.Tensor:
        """Return the memory as it was, and some more at its end, once it has come."""
        self.wait()
        assert self._gathered is not None
        return self._gathered

    def wait(self) -> None:
        """Wait until nothing is under way."""
        if self._work is not None and self._transfer is not None:
            wait_for(self._work, self._transfer, self._group)

    def arrived(self) -> None:
        """Note that the memory is that of whole members again."""
        if self._transfer is not None:
            self._transfer.arrived()
