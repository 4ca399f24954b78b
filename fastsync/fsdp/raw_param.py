"""Params of dtypes without kernels, as integers and fp8: gathered bit by bit, never trained."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastsync._torch import data_of
from fastsync.fsdp.dtype_shard import DtypeShard
from fastsync.fsdp.group_links import FlatGather
from fastsync.fsdp.sharded_param import ShardedParam


class RawShard(DtypeShard):
    """A shard whose unsharded parameters have the bits of their shares, whatever its unit's dtypes.

    The collective is that of the process group.
    """

    _gather: FlatGather | None = None
    _has_memory = False

    @property
    def compute(self) -> torch.dtype:
        return self.dtype

    @property
    def reduce(self) -> torch.dtype:
        return self.dtype

    def _direct_from(self, dtype: torch.dtype) -> int | None:
        return None

    def trained(self) -> tuple[int, ...]:
        """None.

        Raises:
            RuntimeError: a parameter wants a gradient since.
        """
        for param in self.params:
            if param.sharded.requires_grad:
                raise RuntimeError(
                    f"parameter {param.name!r} was of a dtype that cannot be trained when "
                    "fully_shard() was applied; convert the module before"
                )
        return ()

    @property
    def begun(self) -> bool:
        return any(param.unsharded is not None for param in self.params)

    def start_gather(self) -> None:
        if self._has_memory or self._gather is not None:
            return
        self.check_memory()
        assert self.links is not None and self.name is not None
        with self.staging.sending():
            chunk, peers = self.staging.source.view(torch.uint8), self.links.shares.ranks
            self._gather = FlatGather(chunk, self.place.group, peers, self.name)

    @torch.no_grad()
    def finish_gather(self) -> None:
        gather, self._gather = self._gather, None
        if gather is None:
            return
        gathered = gather.wait()
        self.staging.arrived()
        chunks = gathered.view(self.dtype).view(self.place.world, -1)
        for index, param in enumerate(self.params):
            self._fill(param, self._layout().offsets[index], chunks)
        self._has_memory = True
        gather.arrived()

    def _fill(self, param: ShardedParam, offset: int, chunks: torch.Tensor) -> None:
        """Copies every rank's share of a parameter from where it begins in their chunks."""
        whole = self._memory_of(param)
        begin = 0
        for rank in range(self.place.world):
            sizes = param.shape.local(rank, self.place.world)
            share = chunks[rank, offset:].narrow(0, 0, torch.Size(sizes).numel()).view(sizes)
            count = sizes[param.shape.dim]
            whole.narrow(param.shape.dim, begin, count).copy_(share)
            begin += count

    def _memory_of(self, param: ShardedParam) -> torch.Tensor:
        """Return an unsharded parameter, whose memory is there, without autograd's notice that it
        changes.
        """
        if param.unsharded is None or param.unsharded.dtype != self.dtype:
            sizes, device = param.shape.sizes, self.place.device
            param.make_unsharded(torch.empty(sizes, dtype=self.dtype, device=device))
        whole = param.unsharded_local()
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
        return data_of(whole)

    def release(self, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Release what was gathered; the next gather is of the shares in any case."""
        self.finish_gather()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded_local().untyped_storage().resize_(0)
        self._has_memory = False
        self.staging.wait()
