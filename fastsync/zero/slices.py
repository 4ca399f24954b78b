"""The state of a parameter, whole or as what one rank steps on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastsync.reducer.monitor import gather_watched
from fastsync.zero.flat_buffer import FlatBuffer
from fastsync.zero.partition import Slice

T = TypeVar("T")
State = dict[str, Any]
# What a state calls the fp32 master of what it belongs to.
MASTER = "master"
NARROW = (torch.bfloat16, torch.float16)
# Elements of parameters whose state is exchanged at once.
_BATCH = 1 << 24


def batches(space: FlatBuffer) -> Iterator[range]:
    """Parameters whose states are exchanged together."""
    begin = elements = 0
    for index, param in enumerate(space.params):
        if elements and elements + param.numel() > _BATCH:
            yield range(begin, index)
            begin, elements = index, 0
        elements += param.numel()
    yield range(begin, len(space.params))


def by_param(everyones: Iterable[Mapping[Slice, T]]) -> dict[int, dict[Slice, T]]:
    """Return what ranks have said of their pieces, by the number of the parameter."""
    parts: defaultdict[int, dict[Slice, T]] = defaultdict(dict)
    for each in everyones:
        for piece, told in each.items():
            parts[piece.param][piece] = told
    return parts


def of_master(state: State | None, loaded: State | None) -> State | None:
    """Return the loaded state of a master in fp32: torch makes what it loads as narrow as the
    parameter.

    Raises:
        ValueError: a master was made narrow, too.
    """
    if state is None:
        return None
    source, wide = loaded or state, {}
    if MASTER in source and source[MASTER].dtype in NARROW:
        raise ValueError(
            "optimizer.load_state_dict() has rounded fp32 master weights to 16 bits, because zero "
            "did not know this optimizer yet; load with model.load_optimizer_state_dict(optimizer, "
            "state) instead"
        )
    for name, value in state.items():
        wide[name] = value
        if isinstance(value, torch.Tensor):
            wide[name] = source[name].to(value.device)
            if wide[name].dtype in NARROW:
                wide[name] = wide[name].float()
    return wide


def cut_value(space: FlatBuffer, piece: Slice, param: torch.Tensor, value: Any) -> Any:
    """Return a value of a parameter's state, as its piece needs it: memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return (space.cut(piece, value) if value.shape == param.shape else value).clone()


def alike(values: Sequence[Any]) -> bool:
    """Return whether values of parts of one parameter are the same."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return all(
            isinstance(v, torch.Tensor)
            and v.shape == first.shape
            and torch.allclose(v, first, rtol=0.0, atol=0.0, equal_nan=True)
            for v in values
        )
    return all(type(v) is type(first) and v == first for v in values)


def unlike_parts(name: str) -> ValueError:
    """Return the error of a value that belongs to no elements, and in which parts differ."""
    return ValueError(
        f"{name!r} in the optimizer's state differs between parts of a parameter that lie on "
        "different ranks, so the whole has no such value; wrap the model with "
        "zero=Zero(stage, shard_by='tensor')"
    )


def join(space: FlatBuffer, parts: Sequence[tuple[Slice, State]]) -> State:
    """Return the state of a whole parameter from that of its pieces.

    Raises:
        ValueError: a value belongs to no elements, and pieces differ in it.
    """
    joined: State = {}
    for name, first in parts[0][1].items():
        numel = parts[0][0].end - parts[0][0].begin
        by_element = isinstance(first, torch.Tensor) and first.shape == (numel,)
        if len(parts) == 1 or not by_element:
            if len(parts) > 1 and not alike([state[name] for _, state in parts]):
                raise unlike_parts(name)
            joined[name] = first
            continue
        full = space.full_like(parts[0][0].param, first)
        for piece, state in parts:
            space.cut(piece, full).copy_(state[name])
        joined[name] = full
    return joined


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
