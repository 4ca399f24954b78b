"""Parameters in one flat buffer, of which each rank updates its own region for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from fastsync.shard.layout import Piece, ShardLayout

__all__ = ["Space"]


def _strides(param: torch.Tensor) -> tuple[int, ...]:
    """Those of the parameter, if its elements fill their memory; else contiguous ones."""
    numel, filled = param.numel(), 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != filled:
            return torch.empty(param.shape, device="meta").stride()
        filled *= size
    assert filled == numel or numel == 0
    return param.stride()


def _alone(memory: torch.Tensor) -> torch.Tensor:
    """The same memory, which lives as long, behind a storage that holds nothing else.

    Accelerate and others take parameters in one storage for tied ones, and save the first alone. On
    other devices only their allocator's own storages can be recorded on another stream.
    """
    if not memory.is_cpu:
        return memory
    alone: torch.Tensor = from_dlpack(memory)
    return alone


class Space:
    """Parameters of one dtype on one device, moved into one flat buffer; stays as long as they do.

    The parameters remain the same objects, with their shapes and memory formats.

    Args:
        params: in the same order on every rank.
        layout: where they lie, and who owns what.
        group: whose ranks share the work.
        shares_gradients: the ranks may share their gradients, too.
        masters: what each rank owns it has in fp32, too, and steps on that.

    Attributes:
        flat: the parameters.
        owned: what this rank steps on: its elements of the parameters, or fp32 masters of them.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        layout: ShardLayout,
        group: dist.ProcessGroup,
        shares_gradients: bool = False,
        masters: bool = False,
    ) -> None:
        self.params, self.layout = list(params), layout
        self.shares_gradients, self.masters = shares_gradients, masters
        self._rank = group.rank()
        first = self.params[0]
        numel = layout.region * group.size()
        self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self._views = []
        for param, offset in zip(self.params, layout.offsets, strict=True):
            memory = _alone(self.flat[offset : offset + param.numel()])
            view = memory.as_strided(param.shape, _strides(param), memory.storage_offset())
            view.copy_(param.data)
            param.data = view
            self._views.append(view)
        self._elements = {piece: self._elements_of(piece) for piece in layout.owned(self._rank)}
        self.owned = {
            piece: nn.Parameter(elements.float() if masters else elements)
            for piece, elements in self._elements.items()
        }

    def _elements_of(self, piece: Piece) -> torch.Tensor:
        """The elements themselves: of a whole parameter in its shape, else flat."""
        view = self._views[piece.param]
        if piece.end - piece.begin == view.numel():
            return view
        begin = self.layout.offsets[piece.param] + piece.begin
        return self.flat[begin : begin + piece.end - piece.begin]

    def begin_step(self) -> None:
        """Masters follow what somebody has written to the parameters since the last step."""
        if not self.masters:
            return
        with torch.no_grad():
            for piece, elements in self._elements.items():
                written = elements != self.owned[piece].to(elements.dtype)  # NaN, too
                if bool(written.any()):
                    self.owned[piece][written] = elements[written].float()

    def end_step(self) -> None:
        """Rounds masters to the parameters, and lets the gradients go.

        Other ranks change parameters, too: a backward through an older graph is an error.
        """
        increment_version([param for param in self.params if param.grad is not None])
        with torch.no_grad():
            for piece, tensor in self.owned.items():
                tensor.grad = None
                if self.masters:
                    self._elements[piece].copy_(tensor)

    def is_intact(self) -> bool:
        """Whether every parameter still lies here: nobody has moved or converted it."""
        pairs = zip(self.params, self._views, strict=True)
        return all(p.data_ptr() == v.data_ptr() and p.dtype is v.dtype for p, v in pairs)

    def cut(self, piece: Piece, full: torch.Tensor) -> torch.Tensor:
        """The elements of `piece` in a tensor of its parameter's shape: a view where it can be."""
        view = self._views[piece.param]
        if piece.end - piece.begin == view.numel() or full.layout is not torch.strided:
            return full
        if full.stride() != view.stride():
            full = self.full_like(piece.param, full).copy_(full)
        begin = full.storage_offset() + piece.begin
        return full.as_strided((piece.end - piece.begin,), (1,), begin)

    def full_like(self, param: int, part: torch.Tensor) -> torch.Tensor:
        """A tensor in the shape and memory format of a parameter, of the dtype of `part`."""
        view = self._views[param]
        return torch.empty_strided(view.shape, view.stride(), dtype=part.dtype, device=part.device)

    def owned_ranges(self) -> list[tuple[int, int, int]]:
        """By parameter: where this rank's elements begin in its region, how many, and in the
        parameter."""
        ranges = [(0, 0, 0)] * len(self.params)
        for piece in self.owned:
            start = self.layout.offsets[piece.param] + piece.begin - self._rank * self.layout.region
            ranges[piece.param] = (start, piece.end - piece.begin, piece.begin)
        return ranges
