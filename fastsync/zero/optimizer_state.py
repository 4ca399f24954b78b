"""`optimizer.state` of an optimizer whose state is spread over the ranks, by whole parameters.

The state itself belongs to slices of parameters, of which each rank has its own. Scripts look it up
by parameter, as under DistributedDataParallel, and what they change there takes effect:

* An entry that is removed, replaced or added is removed, replaced or added for this rank's slice.
* A value with an element for each element of the parameter is a `StateSlice`. It has the
  parameter's shape but no memory. What treats all elements alike, as `zero_()` does, changes the
  slice. Anything else collects all elements from the ranks first, and has to be done on all.
* A parameter without elements on this rank has the same entries as on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from fastsync._torch import (
    is_view_of_argument,
    local_value,
    placed_value,
    tree_map_only,
    written_arguments,
)
from fastsync.zero.exchange import Exchange, SpreadTensor
from fastsync.zero.flat_buffer import FlatBuffer
from fastsync.zero.partition import Slice
from fastsync.zero.slices import MASTER, State, cut_value


def held_state(optimizer: Optimizer) -> MutableMapping[Any, Any]:
    """Return the state by the tensors that each rank steps on, with or without a view."""
    state: MutableMapping[Any, Any] = optimizer.state
    return state.held if isinstance(state, StateView) else state


@dataclass(frozen=True)
class _ByElement:
    """Placeholder for a tensor with an element for each of a parameter that other ranks own.

    Attributes:
        shape: shape of the whole value; None: that of the parameter.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


@dataclass
class _Elsewhere:
    """Knowledge of this rank about the state of a parameter whose elements other ranks own.

    Attributes:
        known: values that are the same on all ranks, and `_ByElement`.
        steps: steps that have been made since then.
        made: the optimizer has an entry for it, be it empty.
    """

    known: State = field(default_factory=dict)
    steps: int = 0
    made: bool = False


def _is_by_element(value: object, tensor: torch.Tensor, name: str, whole: bool) -> bool:
    """Return whether a value in the state of `tensor` has an element for each of it.

    Args:
        whole: the tensor is a whole parameter, of which every value has one owner.
    """
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and name == "step"):
        return False
    return value.shape == tensor.shape or (whole and value.dim() > 0)


def described(param: torch.Tensor, state: State | None, whole: bool) -> State | None:
    """Describe a whole state to ranks that own nothing of it: numbers, and dtypes of the rest.

    Args:
        state: none, or an empty one, of a parameter that has made no step.
        whole: the parameter has one owner.
    """
    if not state:
        return None
    return {
        name: _ByElement(value.dtype, tuple(value.shape) if value.shape != param.shape else None)
        if _is_by_element(value, param, name, whole)
        else value
        for name, value in state.items()
        if name != MASTER
    }


class Slices:
    """The parameters of one optimizer that are spread over the ranks.

    Args:
        buffers: where the parameters lie.
        exchange: collects values of all ranks.
        order: by each parameter, in the order of the optimizer's groups, what the ranks share of
            it: of a DTensor, its local tensor.
        template: returns the state that a first step makes of a parameter of a buffer, without its
            elements; None: a step makes none.
        siblings: returns what this rank steps on of the parameters in the same group.
        writes: returns a context in which the script changes values. Like the others it keeps
            nothing alive, and returns None once the optimizer is gone.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        exchange: Exchange,
        order: Mapping[torch.Tensor, torch.Tensor],
        template: Callable[[FlatBuffer, int], State | None],
        siblings: Callable[[torch.Tensor], Sequence[torch.Tensor] | None],
        writes: Callable[[], AbstractContextManager[None] | None],
    ) -> None:
        self.exchange, self.rank = exchange, exchange.group.rank()
        self._template, self._siblings, self._writes = template, siblings, writes
        self.locals = order
        self.places: dict[torch.Tensor, tuple[FlatBuffer, int]] = {}
        self.pieces: dict[torch.Tensor, list[tuple[Slice, nn.Parameter]]] = {}
        for buffer in buffers:
            for index, param in enumerate(buffer.params):
                self.places[param] = (buffer, index)
                self.pieces[param] = []
            for piece, tensor in buffer.owned.items():
                self.pieces[buffer.params[piece.param]].append((piece, tensor))
        self._elsewhere: dict[torch.Tensor, _Elsewhere] = {}

    def writing(self) -> AbstractContextManager[None]:
        """Enter once other ranks do not need the values as they are. Every rank does."""
        return self._writes() or nullcontext()

    def note_step(self, buffer: FlatBuffer) -> None:
        """Note a step on the parameters of a buffer that have gradients."""
        for param in buffer.params:
            if not self.pieces[param] and param.grad is not None:
                self._elsewhere.setdefault(param, _Elsewhere()).steps += 1

    def learn(self, param: torch.Tensor, known: State | None) -> None:
        """Set the state of a parameter to this, in the form of `described()`; None: nothing."""
        if not self.pieces[param]:
            self._elsewhere.pop(param, None)
            if known is not None:
                self._elsewhere[param] = _Elsewhere(known, made=True)

    def has_state(self, held: Mapping[Any, Any], param: torch.Tensor) -> bool:
        """Return whether the optimizer has an entry for a parameter: the same on all ranks."""
        if self.pieces[param]:
            return any(tensor in held for _, tensor in self.pieces[param])
        each = self._elsewhere.get(param)
        if each is not None and not each.made:
            self.elsewhere(held, param)
        return each is not None and each.made

    def elsewhere(self, held: Mapping[Any, Any], param: torch.Tensor) -> State:
        """Return the values of a parameter of which this rank has no elements."""
        each = self._elsewhere.setdefault(param, _Elsewhere())
        if each.steps:
            self._update(held, param, each)
        return each.known

    def _update(self, held: Mapping[Any, Any], param: torch.Tensor, each: _Elsewhere) -> None:
        buffer, index = self.places[param]
        made = self._template(buffer, index)
        each.steps, steps = 0, each.steps
        if made is None:
            return
        each.made = True
        like = param if buffer.sharing.whole else torch.empty(0)
        known = each.known
        if "step" in made:
            now = float(known.get("step", 0)) + steps
            known["step"] = (
                torch.full_like(made["step"], now)
                if isinstance(made["step"], torch.Tensor)
                else type(made["step"])(now)
            )
        for name, value in made.items():
            if _is_by_element(value, like, name, buffer.sharing.whole):
                other = value.shape != like.shape
                known[name] = _ByElement(value.dtype, tuple(value.shape) if other else None)
            elif name != "step":
                known[name] = self._as_siblings(held, param, name, known.get("step"))

    def _as_siblings(
        self, held: Mapping[Any, Any], param: torch.Tensor, name: str, step: object
    ) -> object:
        """Return a number that follows from settings and steps: that of another parameter."""
        for tensor in self._siblings(param) or ():
            state = held.get(tensor, {})
            if name in state and step is not None and state.get("step") == step:
                value = state[name]
                return value.clone() if isinstance(value, torch.Tensor) else value
        return _Unknown


class _Unknown:
    """Placeholder for a number that only the owners of a parameter know."""


class StateView(MutableMapping[Any, Any]):
    """Mapping that `optimizer.state` is while some of the state is spread over the ranks.

    Attributes:
        held: the state by what this rank steps on.
        slices: one for each wrapped model that the optimizer steps on.
        used: the optimizer has made a step or loaded a state, be it an empty one.
    """

    def __init__(self, held: MutableMapping[Any, Any]) -> None:
        self.held = held
        self.slices: list[Slices] = []
        self.used = False

    def _slices_of(self, key: object) -> Slices | None:
        if isinstance(key, torch.Tensor):
            for slices in self.slices:
                if key in slices.locals:
                    return slices
        return None

    def __getitem__(self, key: Any) -> Any:
        slices = self._slices_of(key)
        if slices is None:
            return self.held[key]
        if not slices.has_state(self.held, slices.locals[key]):  # a defaultdict makes one, too
            self._clear(slices, key, {})
        return _ParamState(self, slices, key)

    def __setitem__(self, key: Any, values: Any) -> None:
        slices = self._slices_of(key)
        if slices is None:
            self.held[key] = values
            return
        values = dict(values)  # which may be the present ones
        with slices.writing():
            self._clear(slices, key, {})
        _ParamState(self, slices, key).update(values)

    def __delitem__(self, key: Any) -> None:
        slices = self._slices_of(key)
        if slices is None:
            del self.held[key]
            return
        if not slices.has_state(self.held, slices.locals[key]):
            raise KeyError(key)
        with slices.writing():
            self._clear(slices, key, None)

    def _clear(self, slices: Slices, param: torch.Tensor, entry: State | None) -> None:
        """Give the parameter a copy of this entry; None: no entry."""
        local = slices.locals[param]
        slices.learn(local, None if entry is None else dict(entry))
        for _, tensor in slices.pieces[local]:
            self.held.pop(tensor, None)
            if entry is not None:
                self.held[tensor] = dict(entry)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return its values, which stay as they are."""
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        values = self[key]
        values = dict(values) if isinstance(values, _ParamState) else values
        del self[key]
        return values

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:  # __getitem__ would make an entry
            return default
        return self[key]

    def __contains__(self, key: object) -> bool:
        slices = self._slices_of(key)
        if slices is None:
            return key in self.held
        return slices.has_state(self.held, slices.locals[cast(torch.Tensor, key)])

    def __iter__(self) -> Iterator[Any]:
        own: set[int] = set()
        found: list[Any] = []
        for slices in self.slices:
            own.update(id(t) for pieces in slices.pieces.values() for _, t in pieces)
            pairs = slices.locals.items()
            found += [param for param, local in pairs if slices.has_state(self.held, local)]
        return iter([*found, *(key for key in self.held if id(key) not in own)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return self.used or len(self) > 0

    def clear(self) -> None:
        """Remove all entries."""
        for key in list(self):
            del self[key]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "the state of this optimizer is spread over the ranks, so the optimizer itself can be "
            "neither copied nor pickled: use optimizer.state_dict(), on every rank"
        )


class _ParamState(MutableMapping[str, Any]):
    """The state of one parameter. Made of a mapping it is an ordinary dictionary: libraries make
    another one of the same class with other values, and assign that."""

    def __new__(cls, view: Any, *rest: Any) -> Any:
        return super().__new__(cls) if rest else dict(view)

    def __init__(self, view: StateView, slices: Slices, param: torch.Tensor) -> None:
        self._view, self._slices = view, slices
        self._whole, self._param = param, slices.locals[param]
        self._buffer, self._index = slices.places[self._param]

    def _held(self) -> list[tuple[Slice, nn.Parameter, State]]:
        held = self._view.held
        pieces = self._slices.pieces[self._param]
        return [(piece, t, held[t]) for piece, t in pieces if t in held]

    def _known(self) -> State:
        """Return the values by name: of the first piece here, or as known of the others'."""
        if self._slices.pieces[self._param]:
            return next((state for *_, state in self._held()), {})
        return self._slices.elsewhere(self._view.held, self._param)

    def __getitem__(self, name: str) -> Any:
        return placed_value(self._get(name), self._whole, name)

    def _get(self, name: str) -> Any:
        value = self._known()[name]
        if value is _Unknown:
            raise RuntimeError(
                f"this rank owns no elements of a parameter of shape {tuple(self._param.shape)}, "
                f"and does not know {name!r} in its state: read it from optimizer.state_dict(), on "
                "every rank"
            )
        if isinstance(value, _ByElement):
            shape = self._param.shape if value.shape is None else value.shape
            like = torch.empty(0, dtype=value.dtype, device=self._param.device)
            return StateSlice(self._slices, self._param, name, (), (like, tuple(shape)))
        held = self._held()
        if not held or not isinstance(value, torch.Tensor):
            return value
        tensor, whole = held[0][1], self._buffer.sharing.whole
        if not _is_by_element(value, tensor, name, whole):
            if value.numel() > 1:
                raise RuntimeError(
                    f"{name!r} in the optimizer's state has neither one element nor one for each "
                    "of its parameter, so no rank knows the whole of it; wrap the model with "
                    "zero=Zero(stage, shard_by='tensor')"
                )
            if len(held) == 1:
                return value
        by_element = value.shape == tensor.shape
        shape = tuple(self._param.shape if by_element and value.dim() else value.shape)
        parts = tuple((piece, state[name]) for piece, _, state in held)
        return StateSlice(self._slices, self._param, name, parts, (value, shape))

    def __setitem__(self, name: str, value: Any) -> None:
        value = local_value(value, self._whole)
        if isinstance(value, StateSlice) and not value.is_of(self._slices, self._param):
            value = value.whole()  # for which no rank may wait for readers
        with self._slices.writing():
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        pieces = self._slices.pieces[self._param]
        if not pieces:
            whole = self._buffer.sharing.whole
            known = self._slices.elsewhere(self._view.held, self._param)
            known.update(described(self._param, {name: value}, whole) or {})
            return
        for piece, tensor in pieces:
            state = self._view.held.setdefault(tensor, {})
            state[name] = self._cut(piece, tensor, name, value)

    def _cut(self, piece: Slice, tensor: torch.Tensor, name: str, value: Any) -> Any:
        """Return the part of a value that this rank's piece keeps."""
        if isinstance(value, StateSlice):
            return value.part_of(piece)
        if not isinstance(value, torch.Tensor):
            return value
        fits = value.shape == self._param.shape or value.numel() == 1
        if not fits and not self._buffer.sharing.whole:
            raise ValueError(
                f"{name!r} of shape {tuple(value.shape)} has neither one element nor one for each "
                f"of its parameter of shape {tuple(self._param.shape)}, so it cannot be cut into "
                "what each rank owns; wrap the model with zero=Zero(stage, shard_by='tensor')"
            )
        return cut_value(self._buffer, piece, self._param, value)

    def __delitem__(self, name: str) -> None:
        with self._slices.writing():
            del self._known()[name]
            for *_, state in self._held()[1:]:
                del state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known()))

    def __len__(self) -> int:
        return len(self._known())

    def __repr__(self) -> str:
        return repr(dict(self))


class StateSlice(SpreadTensor):
    """A value of the state of a whole parameter, of which each rank has what it owns."""

    _handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    _slices: Slices
    _param: torch.Tensor
    _name: str
    _parts: Sequence[tuple[Slice, torch.Tensor]]

    @staticmethod
    def __new__(
        cls,
        slices: Slices,
        param: torch.Tensor,
        name: str,
        parts: Sequence[tuple[Slice, torch.Tensor]],
        form: tuple[torch.Tensor, tuple[int, ...]],
    ) -> StateSlice:
        """`parts`: what this rank has; `form`: a tensor of the same dtype and device, the shape."""
        like, shape = form
        buffer, index = slices.places[param]
        if shape == tuple(param.shape):
            sizes = buffer.full_like(index, torch.empty(0, dtype=like.dtype, device="meta"))
        else:
            sizes = torch.empty(shape, dtype=like.dtype, device="meta")
        proxy = cls.without_memory(sizes, like)
        proxy._slices, proxy._param, proxy._name, proxy._parts = slices, param, name, parts
        return proxy

    @classmethod
    def otherwise(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{func} cannot take a value of the optimizer's state, which is spread over the "
                "ranks: communicate a clone() of it on every rank, and write the result back with "
                "copy_()"
            )
        if is_view_of_argument(func):
            raise RuntimeError(
                f"{func} would make a view of a value of the optimizer's state, which is spread "
                "over the ranks: clone() the whole value on every rank to read it, or assign the "
                "whole with copy_() or optimizer.state[p][name] = tensor"
            )
        wholes: dict[int, torch.Tensor] = {}

        def whole_of(proxy: StateSlice) -> torch.Tensor:
            if id(proxy) not in wholes:
                wholes[id(proxy)] = proxy.whole()
            return wholes[id(proxy)]

        full = tree_map_only(cls, whole_of, (args, kwargs))
        result = func(*full[0], **full[1])
        for proxy in written_arguments(func, args, kwargs):
            if isinstance(proxy, StateSlice):
                proxy.write(wholes[id(proxy)])
                result = proxy if result is wholes[id(proxy)] else result
        return result

    def same(self) -> StateSlice:
        """Return another one of the same elements."""
        form = (torch.empty(0, dtype=self.dtype, device=self.device), tuple(self.shape))
        return StateSlice(self._slices, self._param, self._name, self._parts, form)

    def whole(self) -> torch.Tensor:
        """Return all elements. Collective, unless they are numbers that this rank has."""
        buffer, _ = self._slices.places[self._param]
        for _, part in self._parts:
            if part.dim() == 0 and self._param.dim():
                return part.clone()
        by_element = self.shape == self._param.shape
        whole = torch.empty_strided(
            self.shape, self.stride(), dtype=self.dtype, device=self.device
        ).zero_()
        if whole.numel() == 0:
            return whole
        exchange = self._slices.exchange
        exchange.meet(f"{self._name!r} in the state of '{exchange.name_of(self._param)}'")
        for piece, part in self._parts:
            if piece.rank == self._slices.rank:
                dense = part.to_dense() if part.is_sparse else part
                (buffer.cut(piece, whole) if by_element else whole).copy_(dense)
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
        exchange.reduce(flat, "the collection of an optimizer's state")
        return whole

    def write(self, whole: torch.Tensor) -> None:
        """Make this rank's elements those of `whole` from now on."""
        buffer, _ = self._slices.places[self._param]
        with self.writing():
            for piece, part in self._parts:
                cut = whole.shape == self._param.shape and part.shape != whole.shape and part.dim()
                part.copy_(buffer.cut(piece, whole) if cut else whole)

    def writing(self) -> AbstractContextManager[None]:
        """Enter once other ranks do not need the elements as they are. Every rank does."""
        # Of a number only ranks with several parts have a proxy.
        everywhere = self.dim() or not self._param.dim()
        return self._slices.writing() if everywhere else nullcontext()

    def to_local(self) -> torch.Tensor:
        """Return the elements that this rank owns, one-dimensional unless these are all."""
        for piece, part in self._parts:
            if piece.rank == self._slices.rank:
                return part
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def is_of(self, slices: Slices, param: torch.Tensor) -> bool:
        """Return whether it is a value in the state of `param` as that is cut now."""
        return slices is self._slices and param is self._param

    def part_of(self, piece: Slice) -> torch.Tensor:
        """Return what this rank has of a piece of the parameter."""
        return next(part for mine, part in self._parts if mine == piece)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.whole()

    def data_ptr(self) -> int:
        raise RuntimeError(
            "a value of the optimizer's state that is spread over the ranks has no address; take "
            "that of to_local()"
        )


_on = StateSlice.handles


@_on("detach.default", "alias.default")
def _detach(func: Any, proxy: StateSlice) -> StateSlice:
    return proxy.same()


@_on(
    *(f"{name}_.{kind}" for name in ("add", "sub", "mul", "div") for kind in ("Scalar", "Tensor")),
    *("zero_.default", "fill_.Scalar", "fill_.Tensor", "neg_.default", "abs_.default"),
    *("clamp_.default", "clamp_min_.default", "clamp_max_.default", "nan_to_num_.default"),
    *("sqrt_.default", "pow_.Scalar"),
)
def _elementwise(func: Any, proxy: Any, *others: Any, **named: Any) -> Any:
    if not isinstance(proxy, StateSlice) or not all(map(StateSlice.is_number, others)):
        return NotImplemented
    with proxy.writing():
        for _, part in proxy._parts:
            func(part, *others, **named)
    return proxy


@_on(
    *(
        f"_foreach_{name}_.{kind}"
        for name in ("add", "sub", "mul", "div")
        for kind in ("Scalar", "Tensor")
    ),
    *("_foreach_zero_.default", "_foreach_neg_.default", "_foreach_abs_.default"),
    *("_foreach_clamp_min_.Scalar", "_foreach_clamp_max_.Scalar"),
)
def _elementwise_all(func: Any, proxies: Sequence[Any], *others: Any, **named: Any) -> Any:
    if not all(map(StateSlice.is_number, others)):
        return NotImplemented
    spread = [proxy for proxy in proxies if isinstance(proxy, StateSlice)]
    plain = [each for each in proxies if not isinstance(each, StateSlice)]
    with ExitStack() as stack:
        for proxy in spread:
            stack.enter_context(proxy.writing())
        if parts := plain + [part for proxy in spread for _, part in proxy._parts]:
            func(parts, *others, **named)
    return None


@_on("copy_.default")
def _copy(func: Any, proxy: Any, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(proxy, StateSlice) or isinstance(source, StateSlice):
        return NotImplemented
    proxy.write(source.expand(proxy.shape))
    return proxy
