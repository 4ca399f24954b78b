"""An optimizer's state of whole parameters, collected from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fastsync.reducer.monitor import gather_watched
from fastsync.zero.flat_buffer import FlatBuffer
from fastsync.zero.slices import State, batches, by_param, join

__all__ = ["whole_states"]


def whole_states(
    spaces: Sequence[FlatBuffer],
    state_of: Callable[[torch.Tensor], State],
    group: dist.ProcessGroup,
) -> dict[torch.Tensor, State]:
    """Return whole states by parameter, without those that have no state. Collective.

    Args:
        state_of: what this rank has for something that it steps on.
        group: of the ranks that share the spaces.
    """
    whole: dict[torch.Tensor, State] = {}
    for space in spaces:
        for batch in batches(space):
            mine = {
                piece: state
                for piece, tensor in space.own.items()
                if piece.param in batch and (state := state_of(tensor))
            }
            place = "the collection of an optimizer's state"
            parts = by_param(gather_watched(mine, group, place))
            for index in sorted(parts):
                whole[space.params[index]] = join(space, list(parts[index].items()))
    return whole
