"""The state of a parameter, whole or as what one rank steps on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fastsync.reducer.monitor import gather_watched
from fastsync.zero.flat_buffer import FlatBuffer
from fastsync.zero.partition import Slice

State = dict[str, Any]
# What a state calls the fp32 master of what it belongs to.
MASTER = "master"
NARROW = (torch.bfloat16, torch.float16)
# Elements of parameters whose state is exchanged at once.
_BATCH = 1 << 24


def batches(buffer: FlatBuffer) -> Iterator[range]:
    """Parameters whose states are exchanged together."""
    begin = elements = 0
    for index, param in enumerate(buffer.params):
        if elements and elements + param.numel() > _BATCH:
            yield range(begin, index)
            begin, elements = index, 0
        elements += param.numel()
    yield range(begin, len(buffer.params))


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


def cut_value(buffer: FlatBuffer, piece: Slice, param: torch.Tensor, value: Any) -> Any:
    """Return a value of a parameter's state, as its piece needs it: memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return (buffer.cut(piece, value) if value.shape == param.shape else value).clone()


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor that can travel as the bytes of its memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_conj() or value.is_neg())
    )


@dataclass(frozen=True)
class Spec:
    """A tensor that travels as bytes, in the order of its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool

    def make(self, device: torch.device) -> torch.Tensor:
        where = torch.device("cpu") if self.is_cpu else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=where)


@dataclass
class _Joined:
    """The state of a parameter, as far as its parts have come.

    Attributes:
        values: the state.
        parts: whose state is there.
        rest: by name, values that belong to no elements: one of each part.
    """

    values: State = field(default_factory=dict)
    parts: set[Slice] = field(default_factory=set)
    rest: dict[str, dict[Slice, Any]] = field(default_factory=dict)


class Whole:
    """States of whole parameters, put together from parts."""

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = buffers
        self._joined: list[dict[int, _Joined]] = [{} for _ in buffers]
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []  # targets and values

    def add(self, number: int, piece: Slice, state: State) -> list[torch.Tensor]:
        """Take in the state of a part, or the shape of it, once more if reading it has failed.

        Returns:
            What to fill, in the order of the `Spec` in the state.
        """
        buffer, numel = self._buffers[number], piece.end - piece.begin
        joined = self._joined[number].setdefault(piece.param, _Joined())
        joined.parts.add(piece)
        partial, targets = numel != buffer.params[piece.param].numel(), []
        for name, value in state.items():
            tensor = isinstance(value, Spec | torch.Tensor)
            if partial and tensor and value.shape == (numel,):
                if name not in joined.values:
                    device = "cpu" if value.is_cpu else buffer.params[0].device
                    like = torch.empty(0, dtype=value.dtype, device=device)
                    joined.values[name] = buffer.full_like(piece.param, like)
                part = buffer.cut(piece, joined.values[name])
            else:
                part = self._new(buffer, value)
                joined.values.setdefault(name, part)
                joined.rest.setdefault(name, {})[piece] = part
            if isinstance(value, Spec):
                targets.append(part)
            elif is_plain(value) and value.is_cpu:  # other ranks send these as a `Spec`
                self._own.append((part, value.detach()))
            elif isinstance(value, torch.Tensor):
                part.copy_(value.detach())
        return targets

    def copy_own(self) -> None:
        """Copy what is here already, on the CPU, which takes as long as reading as much does."""
        for target, value in self._own:
            target.copy_(value)
        self._own.clear()

    @staticmethod
    def _new(buffer: FlatBuffer, value: Any) -> Any:
        """Return room for a value that belongs to one part, or a value that is no tensor."""
        if isinstance(value, Spec):
            return value.make(buffer.params[0].device)
        return torch.empty_like(value.detach()) if isinstance(value, torch.Tensor) else value

    def finished(self) -> dict[torch.Tensor, State]:
        """Return the states once all parts are there.

        Raises:
            ValueError: parts are missing, or differ in a value that belongs to no elements.
        """
        found = {}
        for buffer, each in zip(self._buffers, self._joined, strict=True):
            for index in sorted(each):
                joined, param = each[index], buffer.params[index]
                if sum(part.end - part.begin for part in joined.parts) != param.numel():
                    raise ValueError(
                        f"the optimizer's state of a parameter of shape {tuple(param.shape)} has "
                        "been removed on some ranks alone; change optimizer.state on every rank"
                    )
                for name, values in joined.rest.items():
                    if not _alike(list(values.values())):
                        raise ValueError(
                            f"{name!r} in the optimizer's state differs between parts of a "
                            "parameter that lie on different ranks, so the whole has no such "
                            "value; wrap the model with zero=Zero(stage, shard_by='tensor')"
                        )
                    joined.values[name] = next(iter(values.values()))
                found[param] = joined.values
        return found


def _alike(values: Sequence[Any]) -> bool:
    """Return whether values of parts of one parameter are the same."""
    first, *others = values
    if isinstance(first, torch.Tensor):
        return all(
            isinstance(v, torch.Tensor)
            and v.shape == first.shape
            and torch.allclose(v, first, rtol=0.0, atol=0.0, equal_nan=True)
            for v in others
        )
    return all(type(v) is type(first) and v == first for v in others)


def whole_states(
    buffers: Sequence[FlatBuffer],
    state_of: Callable[[torch.Tensor], State],
    group: dist.ProcessGroup,
) -> dict[torch.Tensor, State]:
    """Return whole states by parameter, without those that have no state. Collective.

    Args:
        state_of: what this rank has for something that it steps on.
        group: of the ranks that share the buffers.
    """
    whole = Whole(buffers)
    for number, buffer in enumerate(buffers):
        for batch in batches(buffer):
            mine = {
                piece: state
                for piece, tensor in buffer.own.items()
                if piece.param in batch and (state := state_of(tensor))
            }
            place = "the collection of an optimizer's state"
            for each in gather_watched(mine, group, place):
                for piece, state in each.items():
                    whole.add(number, piece, state)
            whole.copy_own()
    return whole.finished()
