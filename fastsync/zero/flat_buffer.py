"""Parameters of which each rank updates its own region for all.

[Note: where parameters lie]
A script may keep views of parameters, so these never move after the model has been wrapped. Then
those that come together in a backward move into one flat buffer, a `Home`, as an optimizer over all
of them will cut it: its ranks exchange the buffer in place. Other optimizers, as one of some of the
parameters or one of whole matrices, cut differently; and where ranks may die, what arrives late
must not be written to parameters. There parameters stay where they are, and what travels is copied
to buffers and from them, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from fastsync.reducer.bucket_layout import ALIGNMENT, align_up
from fastsync.wire.formats import Format
from fastsync.zero import parameter_codes
from fastsync.zero.parameter_codes import Codes, holds, holds_any, rounded
from fastsync.zero.partition import Partition, ShardLayout, Slice, cut_by_elements, cut_by_tensors

# Bytes of all ranks that are copied to a buffer at once.
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Sharing:
    """How the ranks share the parameters of one flat buffer.

    Attributes:
        gradients: they may share their gradients, too.
        masters: each rank has its own elements in fp32, too, and steps on those.
        wire: the format of parameters on the wire, which then have masters; None: as they are.
        whole: each parameter has one owner.
    """

    gradients: bool = False
    masters: bool = False
    wire: Format | None = None
    whole: bool = False


def lay_out(params: Sequence[torch.Tensor], shares: int, sharing: Sharing) -> ShardLayout:
    """Return the positions of parameters in their buffer."""
    divide = cut_by_tensors if sharing.whole else cut_by_elements
    align = ALIGNMENT if sharing.wire is None else parameter_codes.ALIGNMENT
    return divide([param.numel() for param in params], shares, align)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def _strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter if its elements fill their memory; else contiguous ones."""
    return param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()


def _alone(memory: torch.Tensor) -> torch.Tensor:
    """Return the same memory, which lives as long, behind a storage that holds nothing else.

    Accelerate and others take parameters in one storage for tied ones, and save the first alone. On
    other devices only their allocator's own storages can be recorded on another stream.
    """
    if not memory.is_cpu:
        return memory
    alone: torch.Tensor = from_dlpack(memory)
    return alone


def fill_memory(param: torch.Tensor) -> None:
    """Move a parameter with gaps between its elements to memory without."""
    strides = _strides(param)
    if param.stride() != strides:
        param.data = torch.empty_strided(
            param.shape, strides, dtype=param.dtype, device=param.device
        ).copy_(param.data)


class Home:
    """Parameters of one dtype on one device, moved into one flat buffer; stays as long as they do.

    The parameters remain the same objects, with their shapes and memory formats.

    Args:
        params: in the same order on every rank.
        shares: how many ranks will share them.
        sharing: what else they will do with them.

    Attributes:
        flat: the parameters.
        layout: where they lie.
        views: of each parameter.
    """

    def __init__(self, params: Sequence[torch.Tensor], shares: int, sharing: Sharing) -> None:
        self.params, self.layout = list(params), lay_out(params, shares, sharing)
        first = self.params[0]
        numel = self.layout.region * shares
        self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        for param, offset in zip(self.params, self.layout.offsets, strict=True):
            memory = _alone(self.flat[offset : offset + param.numel()])
            view = memory.as_strided(param.shape, _strides(param), memory.storage_offset())
            view.copy_(param.data)
            param.data = view
            self.views.append(view)

    def fits(self, layout: ShardLayout) -> bool:
        """Return whether its parameters are all still here, and lie so."""
        return layout == self.layout and _lie_at(self.params, self.views)


def _lie_at(params: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> bool:
    pairs = zip(params, views, strict=True)
    return all(p.data_ptr() == v.data_ptr() and p.dtype is v.dtype for p, v in pairs)


@dataclass
class _Chunk:
    """The same part of the region of each rank.

    Attributes:
        size: elements of one region's part.
        mine: what lies where in the buffer of all parts: of this rank's region.
        others: likewise, of the other regions.
    """

    size: int
    mine: list[tuple[int, torch.Tensor]]
    others: list[tuple[int, torch.Tensor]]


class FlatBuffer:
    """Parameters of one dtype on one device that are cut together.

    Args:
        params: in the same order on every rank.
        partition: the ranks that share them.
        sharing: what else they do with them.
        home: where they lie, for this cut; None: anywhere. See [Note: where parameters lie].

    Attributes:
        layout: the part of a region that each is, and the owner of each part.
        loaded: masters that `load_master` was given since the last step.
        owned: what this rank steps on: its elements of the parameters, or fp32 masters of them; and
            those that it holds for another.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        partition: Partition,
        sharing: Sharing,
        home: Home | None = None,
    ) -> None:
        layout = lay_out(params, partition.size, sharing)
        if layout.region == 0:
            sharing = replace(sharing, wire=None)
        self.params, self.layout, self.sharing = list(params), layout, sharing
        self._rank = partition.mine
        self._codes: Codes | None = None
        self.loaded: dict[Slice, torch.Tensor] = {}
        self._awaits_codes = False
        first = self.params[0]
        if sharing.wire is not None:
            self._codes = Codes(layout, sharing.wire, partition.size, first.device)
        self.dtype, self._device, self._ranks = first.dtype, first.device, partition.size
        self._home = home
        if self._home is not None:
            self._views = self._home.views
        else:
            for param in self.params:
                fill_memory(param)
            self._views = [param.data for param in self.params]
        self._chunks: list[_Chunk] | None = None
        self._elements = {
            piece: self._elements_of(piece)
            for share in partition.kept
            for piece in layout.owned(share)
        }
        self.owned = {
            piece: nn.Parameter(
                elements.to(torch.float32, copy=True) if sharing.masters else elements
            )
            for piece, elements in self._elements.items()
        }

    @property
    def own(self) -> dict[Slice, torch.Tensor]:
        """Return the pieces of `owned` whose owner is this rank."""
        return {piece: t for piece, t in self.owned.items() if piece.rank == self._rank}

    def delivered(self, piece: Slice) -> torch.Tensor:
        """Return the parameter's values of a piece that this rank steps on, as after the step."""
        elements = self.cut(piece, self.params[piece.param].detach())
        if not self._awaits_codes or self.sharing.wire is None:
            return elements.clone()
        master = self.owned[piece].detach()
        exact = torch.equal(elements.float(), master)
        return elements.clone() if exact else rounded(master, self.sharing.wire, elements)

    def _elements_of(self, piece: Slice) -> torch.Tensor:
        """Return the elements themselves: of a whole parameter in its shape, else flat."""
        view = self._views[piece.param]
        if piece.end - piece.begin == view.numel():
            return view
        return self._in_a_row(piece.param, piece.begin, piece.end)

    def _in_a_row(self, param: int, begin: int, end: int) -> torch.Tensor:
        """Return the elements of a parameter in the order of its memory."""
        view = self._views[param]
        return view.as_strided((end - begin,), (1,), view.storage_offset() + begin)

    def load_master(self, piece: Slice, master: torch.Tensor) -> bool:
        """Take a checkpoint's exact values of a piece, from which the parameter's were rounded.

        They count at the next step, where the parameter still holds what some format has made of
        them: the script may load weights and the optimizer's state in any order.

        Returns:
            Whether the piece has a master, which is this one from now on.
        """
        if self.sharing.masters or self.dtype is torch.float32:
            self.loaded[piece] = master.to(self._device, torch.float32, copy=True)
        if self.sharing.masters:
            self.owned[piece].data.copy_(master)
        return self.sharing.masters

    def loaded_master(self, piece: Slice) -> torch.Tensor | None:
        """Return the master that `load_master` has received since the last step."""
        return self.loaded.get(piece)

    def begin_step(self) -> None:
        """Update masters from writes to the parameters since the last step."""
        loaded = self.loaded.copy()
        self.loaded.clear()
        with torch.no_grad():
            for piece, elements in self._elements.items():
                if piece in loaded:
                    exact = holds_any(elements, loaded[piece])
                    self.owned[piece].copy_(torch.where(exact, loaded[piece], elements))
                elif self.sharing.masters:
                    self._follow(piece, elements)

    def _follow(self, piece: Slice, elements: torch.Tensor) -> None:
        master = self.owned[piece]
        if self.sharing.wire:
            written = ~holds(elements, master, self.sharing.wire)
        else:
            written = elements != master.to(elements.dtype)  # NaN, too
        if not master.is_cpu:
            torch.where(written, elements.float(), master, out=master)
        elif bool(written.any()):
            master[written] = elements[written].float()

    def end_step(self) -> Iterator[tuple[torch.Tensor, Callable[[], None]]]:
        """Round masters to the parameters, and release the gradients.

        Other ranks change parameters, too: a backward through an older graph is an error.

        Yields:
            Buffers of as many equal parts as there are ranks, of which each sends its own to all;
            and what to call once every rank's part is there.
        """
        increment_version([param for param in self.params if param.grad is not None])
        for tensor in self.owned.values():
            tensor.grad = None
        if self._codes is not None:
            self._awaits_codes = True
            with torch.no_grad():
                codes = self._codes.encode(self._rank, self.own, self._changed())
            yield codes, partial(self._decode, codes)
            return
        if self.sharing.masters:
            with torch.no_grad():
                for piece, tensor in self.owned.items():
                    self._elements[piece].copy_(tensor)
        if self._ranks == 1:
            return
        if self._home is not None:
            yield self._home.flat, lambda: None
            return
        if self._chunks is None:
            self._chunks = self._make_chunks()
        for chunk in self._chunks:
            numel = chunk.size * self._ranks
            packed = torch.empty(numel, dtype=self.dtype, device=self._device)
            _copy(list(_parts(packed, chunk.mine)))
            yield packed, partial(_unpack, packed, chunk.others)

    def _decode(self, codes: torch.Tensor) -> None:
        """Take what `end_step` has yielded, once every rank's part is there."""
        assert self._codes is not None
        self._codes.decode(codes, self._elements_of)
        self._awaits_codes = False

    def _make_chunks(self) -> list[_Chunk]:
        """Return the chunks that travel one at a time if parameters do not lie in one buffer."""
        region = self.layout.region
        most = align_up(max(1, _CHUNK // self.dtype.itemsize // self._ranks), ALIGNMENT)
        begins = range(0, region, most)
        chunks = [_Chunk(min(most, region - begin), [], []) for begin in begins]
        for piece in self.layout.pieces:
            start = self.layout.offsets[piece.param] + piece.begin - piece.rank * region
            end = start + piece.end - piece.begin
            for number in range(start // most, -(-end // most)):
                first, last = max(start, number * most), min(end, (number + 1) * most)
                chunk, shift = chunks[number], piece.begin - start
                place = piece.rank * chunk.size + first - number * most
                elements = self._in_a_row(piece.param, first + shift, last + shift)
                whose = chunk.mine if piece.rank == self._rank else chunk.others
                whose.append((place, elements))
        return chunks

    def _changed(self) -> torch.Tensor:
        """Return for which pieces the parameters do not hold the exact masters: bool."""
        pairs = ((self._elements[piece], master) for piece, master in self.own.items())
        differ = [parameter_codes.differ(elements.float(), master) for elements, master in pairs]
        return torch.stack(differ) if differ else torch.zeros(0, dtype=torch.bool)

    def is_intact(self) -> bool:
        """Return whether every parameter still lies here, neither moved nor converted."""
        return _lie_at(self.params, self._views)

    def cut(self, piece: Slice, full: torch.Tensor) -> torch.Tensor:
        """Return the elements of `piece` in a tensor of its parameter's shape: a view if
        possible."""
        view = self._views[piece.param]
        if piece.end - piece.begin == view.numel() or full.layout is not torch.strided:
            return full
        if full.stride() != view.stride():
            full = self.full_like(piece.param, full).copy_(full)
        begin = full.storage_offset() + piece.begin
        return full.as_strided((piece.end - piece.begin,), (1,), begin)

    def full_like(self, param: int, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the shape and memory format of a parameter, of the dtype of `part`."""
        view = self._views[param]
        return torch.empty_strided(view.shape, view.stride(), dtype=part.dtype, device=part.device)

    def outline(self, param: int, piece: torch.Tensor, value: Any) -> Any:
        """Return a value of a piece's state, or, if it belongs to its elements, one without memory
        that belongs to the whole parameter's."""
        if not isinstance(value, torch.Tensor) or value.shape != piece.shape:
            return value
        return self.full_like(param, value.to("meta"))

    def owned_ranges(self) -> list[tuple[int, int, int]]:
        """Return, by parameter, where this rank's elements begin in its region, their number, and
        where they begin in the parameter."""
        ranges = [(0, 0, 0)] * len(self.params)
        for piece in self.own:
            start = self.layout.offsets[piece.param] + piece.begin - self._rank * self.layout.region
            ranges[piece.param] = (start, piece.end - piece.begin, piece.begin)
        return ranges


def _parts(
    buffer: torch.Tensor, places: Sequence[tuple[int, torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for place, elements in places:
        yield buffer[place : place + elements.numel()], elements


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def _unpack(buffer: torch.Tensor, places: Sequence[tuple[int, torch.Tensor]]) -> None:
    _copy([(elements, part) for part, elements in _parts(buffer, places)])
