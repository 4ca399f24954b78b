"""An optimizer's state by parameter name, of which each rank saves and loads what it owns.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: {"state":
{parameter: {name: value}}, "param_groups": [settings, with names as "params"]}. So files fit any
number of ranks, any stage, and models under DistributedDataParallel.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fastsync._torch import first_state, local_part, local_place, local_value
from fastsync.faults import consensus
from fastsync.reducer.engine import Engine
from fastsync.reducer.monitor import watched
from fastsync.zero.dcp_chunks import Chunks
from fastsync.zero.neighbour_copies import share_again
from fastsync.zero.optimizer_state import held_state
from fastsync.zero.sharded_optimizer import ShardedOptimizer, ShardedOptimizers
from fastsync.zero.slices import MASTER

_COMPARED = "the comparison of checkpoints"

State = Mapping[str, Any]


@dataclass(frozen=True)
class _Held:
    """The part of one parameter that this rank steps on.

    Attributes:
        group: the number of its parameter group.
        param: the parameter; of a DTensor that ranks share, the local tensor.
        placed: the parameter that the optimizer has.
        tensor: the tensor that the optimizer has state for: the parameter, or this rank's piece of
            it.
        begin: where the piece begins, in the order of the parameter's memory.
        sparse: whether its gradient may be sparse.
    """

    name: str
    group: int
    param: torch.Tensor
    placed: torch.Tensor
    tensor: torch.Tensor
    begin: int
    sparse: bool

    @property
    def partial(self) -> bool:
        """Return whether other ranks have the rest."""
        return self.tensor.numel() != self.param.numel()

    def in_chunks(self, name: str, value: object) -> bool:
        """Return whether other ranks have the rest of a value in its state."""
        if not isinstance(value, torch.Tensor) or value.shape != self.tensor.shape:
            return False
        local = self.param is not self.placed and (name != "step" or value.dim() > 0)
        return self.partial or local

    def zero_gradient(self) -> torch.Tensor:
        if self.sparse:
            return torch.zeros_like(self.param, layout=torch.sparse_coo, requires_grad=False)
        return torch.zeros_like(self.tensor, requires_grad=False)


class _Blank(dict[str, Any]):
    """Values of one parameter that no step has made: room for those of a checkpoint.

    The checkpoint may have none, as of a parameter that never had a gradient.
    """

    def __init__(self, values: State) -> None:
        super().__init__(values)
        self._versions = {name: _version(tensor) for name, tensor in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.items():
            tensor = value.part if isinstance(value, Chunks) else value
            if isinstance(tensor, torch.Tensor) and local_part(tensor).numel():
                yield name, tensor

    def unread(self) -> list[str]:
        """Return the names of tensors that nothing has been written to."""
        versions = self._versions
        return [name for name, tensor in self._tensors() if _version(tensor) == versions[name]]

    def was_read(self) -> bool:
        """Return whether anything has been written to."""
        return len(self.unread()) < len(self._versions)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that changes with a tensor's values, or those of this rank's part of it."""
    return tensor._version + local_part(tensor)._version


class _Share(dict[str, Any]):
    """This rank's share of a state by parameter name, which pickle and `torch.save` write whole.

    Args:
        share: the part of the state that this rank has.
        whole: fetches what all have.
    """

    def __init__(self, share: State, whole: Callable[[], State]) -> None:
        super().__init__(share)
        self._whole = whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of a class that torch.load(weights_only=True) knows.
        return OrderedDict, (), None, None, iter(self._whole().items())

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(state, memo) for name, state in self.items()}


class OptimizerCheckpoint:
    """The optimizers of one model, as checkpoints see them.

    Args:
        engine: of the model.
        module: the model, which names the parameters.
        sharded: its optimizers; None where every rank has the whole state.
    """

    def __init__(
        self, engine: Engine, module: nn.Module, sharded: ShardedOptimizers | None
    ) -> None:
        self._engine, self._sharded = engine, sharded
        self._device = engine.params[0].tensor.device
        # A compiled module is one in another; names in files are those of the module itself.
        named = module.named_parameters()
        self._names = {id(param): name.replace("_orig_mod.", "") for name, param in named}
        self._sparse = {id(param.tensor) for param in engine.params if param.sparse}

    def capture(self, optimizer: Optimizer) -> dict[str, Any]:
        """See `FastDDP.optimizer_state_dict`.

        Collective before the first step on a sharded state, which the ranks then share.
        """
        optimizer = _innermost(optimizer)
        if self._sharded is None:
            groups = self._groups(optimizer)
            return {"state": self._state(optimizer, None), "param_groups": groups}
        found = self._sharded.find(optimizer, moved=True)
        if found is not None and not found.blank:
            groups, state = self._groups(optimizer), self._state(optimizer, found)
            whole = partial(self._whole_state, optimizer, found)
            return {"state": _Share(state, whole), "param_groups": groups}
        self._sharded.meet("model.optimizer_state_dict()", "Call it on every rank")
        with self._together("saved"):
            groups = self._groups(optimizer)
        taken = self._attach(optimizer)
        with self._together("saved"):
            state = self._state(optimizer, taken)
        return {"state": state, "param_groups": groups}

    def _whole_state(
        self, optimizer: Optimizer, taken: ShardedOptimizer
    ) -> dict[str, dict[str, Any]]:
        """Fetch the state of all parameters by name from the other ranks. Not collective."""
        states = {**held_state(optimizer), **taken.fetch()}
        params = (param for group in optimizer.param_groups for param in group["params"])
        return {self._names[id(p)]: dict(state) for p in params if (state := states.get(p))}

    def restore(self, optimizer: Optimizer, state: State) -> None:
        """See `FastDDP.load_optimizer_state_dict`. Collective."""
        optimizer = _innermost(optimizer)
        if _is_whole(state):
            self._attach(optimizer)
            optimizer.load_state_dict(dict(state))
            return
        with self._together("loaded"):
            groups = _matched(self._groups(optimizer), state)
        taken = self._attach(optimizer)
        held, empty = self._held(optimizer, taken), self._is_unread(state["state"])
        with self._together("loaded"):
            if empty:
                raise ValueError(
                    "nothing has been read into the optimizer's state: call "
                    "torch.distributed.checkpoint.load() before load_optimizer_state_dict()"
                )
            loaded = {each.tensor: _values(each, state["state"].get(each.name)) for each in held}
        state_here = held_state(optimizer)
        if taken is not None:
            taken.begin_change()
        for tensor, values in loaded.items():
            state_here.pop(tensor, None)
            if rest := values if taken is None else taken.take_master(tensor, values):
                state_here[tensor] = rest
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
        if taken is not None:
            taken.mark_used()
            taken.tell(optimizer)
            taken.end_change(optimizer)
            if taken.partition.doubled:
                share_again(taken, optimizer, self._engine.group)

    def _attach(self, optimizer: Optimizer) -> ShardedOptimizer | None:
        """Shard the state, and return its owner; None where every rank keeps
        the whole. Collective.
        """
        sharded = self._sharded
        params = (param for group in optimizer.param_groups for param in group["params"])
        if sharded is None or not any(map(sharded.shares_steps, params)):
            return None
        return sharded.attach(optimizer)

    def _together(self, done: str) -> AbstractContextManager[object]:
        failure = f"the optimizer's state cannot be {done} on every rank;"
        run = partial(watched, self._engine.group, _COMPARED)
        return consensus.together(self._engine.group, self._device, failure, run)

    def _is_unread(self, states: Mapping[str, State]) -> bool:
        """Return whether there is room for a state, and no rank has read any. Collective."""
        blanks = [values for values in states.values() if isinstance(values, _Blank)]
        flags = [any(blanks), any(values.was_read() for values in blanks)]
        found = torch.tensor(flags, dtype=torch.int32, device=self._device)
        group, most = self._engine.group, dist.ReduceOp.MAX
        watched(group, _COMPARED, partial(dist.all_reduce, found, most, group=group, async_op=True))
        return found.tolist() == [1, 0]

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the settings, with names in place of parameters.

        Raises:
            ValueError: a parameter is none of the model's.
        """
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in self._names:
                    raise ValueError(
                        f"expects an optimizer of this model, but parameter group {number} has a "
                        f"parameter of shape {tuple(param.shape)} that is not the model's; pass "
                        "the optimizer that was made of model.parameters()"
                    )
            groups.append({**group, "params": [self._names[id(p)] for p in group["params"]]})
        return groups

    def _held(self, optimizer: Optimizer, taken: ShardedOptimizer | None) -> list[_Held]:
        """Return what this rank has state for: its pieces, and all parameters
        that are not sharded.
        """
        buffers = taken.buffers if taken is not None else []
        shared = {id(param) for buffer in buffers for param in buffer.params}
        local_of = self._sharded.local if self._sharded is not None else lambda param: param
        pieces = {
            id(buffer.params[piece.param]): (tensor, piece.begin)
            for buffer in buffers
            for piece, tensor in buffer.own.items()
        }
        held = []
        for number, group in enumerate(optimizer.param_groups):
            for placed in group["params"]:
                param = local_of(placed)
                if id(param) not in shared:
                    param = placed
                if id(param) in pieces or id(param) not in shared:
                    tensor, begin = pieces.get(id(param), (param, 0))
                    sparse = id(placed) in self._sparse
                    name = self._names[id(placed)]
                    held.append(_Held(name, number, param, placed, tensor, begin, sparse))
        return held

    def _state(
        self, optimizer: Optimizer, taken: ShardedOptimizer | None
    ) -> dict[str, dict[str, Any]]:
        """Return this rank's part of the state, or room for it; nothing for parameters without
        state.
        """
        held, group = self._held(optimizer, taken), self._engine.group
        if taken.blank if taken is not None else not optimizer.state:
            gradients: list[dict[str, torch.Tensor]] = [{} for _ in optimizer.param_groups]
            for each in held:
                if each.placed.requires_grad:
                    gradients[each.group][each.name] = each.zero_gradient()
            room = first_state(optimizer, gradients)
            for each in held:
                if taken is not None and each.tensor in taken.masters:
                    room.setdefault(each.name, {})[MASTER] = each.tensor.detach().clone()
            return {
                each.name: _Blank(_named(each, room[each.name], group))
                for each in held
                if each.name in room
            }
        states = {
            each.name: held_state(optimizer).get(each.tensor)
            if taken is None
            else taken.saved(optimizer, each.tensor)
            for each in held
        }
        return {
            each.name: _named(each, state, group) for each in held if (state := states[each.name])
        }


def _named(held: _Held, state: State, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return a parameter's state in the form of checkpoints.

    Args:
        group: the ranks that share the parameters.

    Raises:
        ValueError: it is unknown which elements a value belongs to.
    """
    named = {}
    for name, value in state.items():
        if held.in_chunks(name, value):
            value = Chunks(held.placed, value, held.begin, local_place(held.placed, group))
        elif held.partial and not _is_scalar(value):
            raise ValueError(
                f"{name!r} in the state of {held.name!r} is neither a number nor has it the shape "
                "of what the optimizer steps on, so it cannot be saved in pieces; use "
                "zero=Zero(stage, shard_by='tensor')"
            )
        named[name] = value
    return named


def _is_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return not isinstance(value, Mapping | Sequence) or isinstance(value, str)


def _values(held: _Held, saved: State | None) -> State:
    """Return the optimizer's values for what this rank steps on.

    Raises:
        ValueError: something is missing, or the values are those of other elements.
    """
    if not saved or (isinstance(saved, _Blank) and not saved.was_read()):
        return {}
    unread = saved.unread() if isinstance(saved, _Blank) else []
    if lacking := [name for name in unread if name != MASTER]:  # which can follow the parameter
        raise ValueError(
            f"the checkpoint has no {lacking[0]!r} in the state of {held.name!r}; load one of the "
            "same model and class of optimizer"
        )
    return {name: _part(held, name, saved[name]) for name in saved if name not in unread}


def _part(held: _Held, name: str, value: Any) -> Any:
    whole = not isinstance(value, Chunks)
    if whole and held.param is not held.placed:
        value = local_value(value, held.placed)
    if isinstance(value, torch.Tensor) and whole and value.shape == held.param.shape:
        return _cut(held, value) if held.partial else value.to(held.tensor.device)
    if whole and (not held.partial or _is_scalar(value)):
        return value
    if whole or value.part.shape != held.tensor.shape or value.begin != held.begin:
        raise ValueError(
            f"{name!r} in the state of {held.name!r} is not of the elements that this rank owns; "
            "pass what model.optimizer_state_dict(optimizer) returned on this rank, or whole "
            "tensors to torch's set_optimizer_state_dict()"
        )
    return value.part


def _cut(held: _Held, whole: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank owns, of a tensor of all."""
    like, device = held.param, held.tensor.device
    ordered = torch.empty_strided(like.shape, like.stride(), dtype=whole.dtype, device=device)
    ordered.copy_(whole)
    return ordered.as_strided((held.tensor.numel(),), (1,), held.begin).clone()


def _is_whole(state: State) -> bool:
    """Return whether it is what `optimizer.state_dict()` returns: numbers stand for parameters."""
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    return any(isinstance(param, int) for group in groups for param in group["params"])


def _matched(groups: Sequence[State], state: State) -> list[dict[str, Any]]:
    """Return the saved settings of each group, found by the names of its parameters.

    Raises:
        TypeError, ValueError: the state is none, or that of other parameters or groups.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise TypeError(
            f"expects what model.optimizer_state_dict() returned, but got {type(state).__name__}"
        )
    ours = {name: i for i, group in enumerate(groups) for name in group["params"]}
    theirs = {name: i for i, group in enumerate(state["param_groups"]) for name in group["params"]}
    remedy = "load the checkpoint into the model and the parameter groups that it was saved from"
    if missing := [name for name in ours if name not in theirs]:
        raise ValueError(f"the checkpoint has no {missing[0]!r}, but the optimizer has; {remedy}")
    if unknown := [name for name in theirs if name not in ours]:
        raise ValueError(f"the checkpoint has {unknown[0]!r}, but the optimizer has not; {remedy}")
    pairs = {(i, theirs[name]) for name, i in ours.items()}
    if len(pairs) > len(set(ours.values())) or len(pairs) > len(set(theirs.values())):
        raise ValueError(f"the checkpoint has its parameters in other groups; {remedy}")
    places = dict(pairs)
    return [
        {
            name: value
            for name, value in state["param_groups"][places.get(i, i)].items()
            if name != "params"
        }
        for i in range(len(groups))
    ]


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Return the wrapped optimizer: libraries wrap one in another, which shares its state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Optimizer) else optimizer
