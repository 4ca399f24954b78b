"""Parameters as codes: what travels after a step where the exact weights stay with their owners.

The weights' half of ZeRO++ (Wang et al., "ZeRO++: Extremely efficient collective communication for
giant model training", 2023), which calls it qwZ. Each rank codes its fp32 masters, and every rank
decodes what all have sent, its own codes too: so all have the same bits.

[Note: blocks of masters]
A block of a format begins at a multiple of its size within its parameter, because pieces do
(`ALIGNMENT` holds whole blocks of every format). So what a master is rounded to depends on the
parameter's masters alone, not on how many ranks share it: a checkpoint fits any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from fastsync.config.arguments import PARAMETER_WIRES
from fastsync.reducer import core
from fastsync.reducer.bucket_layout import align_up
from fastsync.wire.formats import FORMATS, Format
from fastsync.zero.partition import ShardLayout, Slice

# Elements: whole blocks of each format.
ALIGNMENT: Final = max(FORMATS[name].block for name in PARAMETER_WIRES)
# Bytes that a chunk's codes, and its flags, are filled up to.
_FILL: Final = 16


def _payload_bytes(format: Format, numel: int) -> int:
    return align_up(format.coded_bytes(numel), _FILL)


def rounded(master: torch.Tensor, format: Format, like: torch.Tensor) -> torch.Tensor:
    """Return the elements that a piece's master becomes, in the dtype and form of `like`."""
    plan = (format.name, align_up(max(1, master.numel()), format.block))
    payload = torch.empty(_payload_bytes(format, plan[1]), dtype=torch.uint8, device=master.device)
    result = torch.empty_like(like)
    core.encode([master], [0], payload, plan, 1.0)
    core.decode([result], [0], payload, plan)
    return result


def holds(elements: torch.Tensor, master: torch.Tensor, format: Format) -> torch.Tensor:
    """Return which elements of a parameter equal their rounded masters. Bool, of their shape."""
    there = rounded(master, format, elements)
    if elements.is_cpu and torch.equal(elements, there):  # as almost always
        return torch.ones_like(elements, dtype=torch.bool)
    return (elements == there) | (elements.isnan() & there.isnan())


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether any element differs, NaN always: zero-dimensional. The host does not wait."""
    if one.is_cpu:
        return torch.tensor(not torch.equal(one, other), device="cpu")
    return (one != other).any()


def holds_any(elements: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the same for masters from a checkpoint, which may have travelled in any format or
    none.
    """
    there = elements == master.to(elements.dtype)
    for name in PARAMETER_WIRES:
        there |= holds(elements, master, FORMATS[name])
    return there


class Codes:
    """Codes of the regions of one flat buffer: a chunk of bytes for each rank.

    A chunk is the codes of the region, then a byte for each piece, which says whether it was sent.
    Pieces that no step has changed stay as they are on every rank: a frozen parameter is exact.
    On a device only its kernels know which these are.

    Args:
        layout: a layout whose regions and offsets are multiples of `ALIGNMENT`.
        ranks: number of ranks that share it.
        device: device of the parameters.
    """

    def __init__(
        self, layout: ShardLayout, format: Format, ranks: int, device: torch.device
    ) -> None:
        self._layout, self._ranks, self._device = layout, ranks, device
        self._plan = (format.name, layout.region)
        self._owned = [layout.owned(rank) for rank in range(ranks)]
        self._flags = _payload_bytes(format, layout.region)
        self._chunk = self._flags + align_up(max(map(len, self._owned)), _FILL)

    def _filled(
        self, tensors: list[torch.Tensor], pieces: Sequence[Slice]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return the tensors with elements, and where their pieces begin in the owner's region."""
        filled = [(t, p) for t, p in zip(tensors, pieces, strict=True) if t.numel()]
        starts, region = self._layout.offsets, self._layout.region
        offsets = [starts[p.param] + p.begin - p.rank * region for _, p in filled]
        return [tensor for tensor, _ in filled], offsets

    def encode(
        self, rank: int, masters: Mapping[Slice, torch.Tensor], changed: torch.Tensor
    ) -> torch.Tensor:
        """Return the chunks of all ranks, of which this rank's is filled: uint8, flat.

        Args:
            masters: master of each piece that `rank` owns, in order.
            changed: which of them are sent to the others: bool.
        """
        payload = torch.zeros((self._ranks, self._chunk), dtype=torch.uint8, device=self._device)
        tensors, offsets = self._filled(list(masters.values()), list(masters))
        core.encode(tensors, offsets, payload[rank, : self._flags], self._plan, 1.0)
        payload[rank, self._flags : self._flags + len(masters)] = changed
        return payload.flatten()

    def decode(self, payload: torch.Tensor, elements_of: Callable[[Slice], torch.Tensor]) -> None:
        """Write what every rank has sent to the elements of the parameters."""
        for owned, chunk in zip(self._owned, payload.view(self._ranks, self._chunk), strict=True):
            codes, flags = chunk[: self._flags], chunk[self._flags :]
            if payload.is_cpu:
                sent = [piece for piece, flag in zip(owned, flags.tolist(), strict=False) if flag]
                self._decode_to([elements_of(piece) for piece in sent], sent, codes)
                continue
            elements = [elements_of(piece) for piece in owned]
            decoded = [torch.empty_like(each) for each in elements]
            self._decode_to(decoded, owned, codes)
            for flag, fresh, there in zip(flags.bool(), decoded, elements, strict=False):
                torch.where(flag, fresh, there, out=there)

    def _decode_to(
        self, tensors: list[torch.Tensor], pieces: Sequence[Slice], codes: torch.Tensor
    ) -> None:
        tensors, offsets = self._filled(tensors, pieces)
        core.decode(tensors, offsets, codes, self._plan)
