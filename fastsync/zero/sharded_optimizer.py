"""Optimizers whose state is spread over the ranks: each rank steps on what it owns, for all.

Stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
models", 2020). Gradients are averaged as without it, and outside of `optimizer.step()` nothing
differs: parameters, gradients and parameter groups are those that the script made. A proxy
optimizer makes the step on this rank's pieces of the parameters; then the ranks exchange what they
updated.

[Note: steps one after the other]
The ranks exchange one buffer of parameters while the optimizer steps on the next. Torch calls a
closure first in a step, after all hooks; ours makes the steps on all buffers but the last, which is
left to the call itself. So hooks and schedulers see one step. Only classes of torch whose update of
each parameter concerns nothing else are given their parameters in turns.

An optimizer is taken over at its first step. Its state then belongs to the pieces, and
`state_dict()` and `load_state_dict()` speak of whole parameters again. Any rank may call
`state_dict()` alone: fastsync/zero/state_fetch.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, Optimizer

from fastsync._build.env import Env
from fastsync._torch import (
    backward_is_running,
    first_state,
    has_views,
    is_cut,
    is_dtensor,
    local_value,
    placed_value,
)
from fastsync.config.arguments import Zero
from fastsync.reducer.buckets import travels_coded
from fastsync.reducer.engine import Engine
from fastsync.reducer.gradient_shards import ShardedUnit
from fastsync.reducer.monitor import gather_watched, make_rendezvous, number_of
from fastsync.reducer.optimizer_hooks import (
    Arguments,
    StepWatcher,
    is_elementwise,
    known_optimizers,
    optimizer_proxy,
    params_of,
    plain_step,
    watch_steps,
    with_loss,
)
from fastsync.reducer.tied_parameters import check_untied
from fastsync.reducer.unused_parameters import NamedParam
from fastsync.reducer.weak_calls import weakly
from fastsync.wire.formats import FORMATS
from fastsync.zero.delivery import Delivery
from fastsync.zero.exchange import Exchange
from fastsync.zero.flat_buffer import FlatBuffer, Home, Sharing, fill_memory, lay_out
from fastsync.zero.gradient_proxies import (
    GradientShards,
    ShardGroup,
    gather_foreign,
    lend_gradients,
    make_whole,
)
from fastsync.zero.optimizer_state import Slices, StateView, described, held_state
from fastsync.zero.partition import Partition, Slice
from fastsync.zero.slices import MASTER, NARROW, State, cut_value, of_master, whole_states
from fastsync.zero.state_fetch import Others, StateShards, await_others, fetch_whole
from fastsync.zero.unaveraged import check_averaged

# Each parameter's update depends on that parameter alone, but on all of its elements.
_TENSORWISE = ("Adafactor", "Muon", "SparseAdam")
_BUFFER = 8 << 20  # bytes


class _Kind(NamedTuple):
    """Properties that parameters in one buffer share; `bucket`: None where it does not matter."""

    dtype: torch.dtype
    device: torch.device
    whole: bool
    bucket: int | None


class ShardedOptimizers(StepWatcher):
    """Every optimizer that steps on parameters of one model.

    Args:
        engine: of the model.
        policy: what may be cut, what has fp32 masters, and what parameters travel as.

    Attributes:
        locals: what the ranks share of each parameter: of a DTensor, its local tensor.
        partition: ranks that will share the state of the next optimizer.
        delivery: how what they update reaches the others.
        others: the ranks that have the rest of the state.
        taken: how many optimizers have been taken over so far.
        exchange: of single gradients and values of a state.
        saved_locally: numbers of those whose `state_dict()` `settings_alone` has seen called.
    """

    def __init__(self, engine: Engine, policy: Zero) -> None:
        self.engine, self.unit, self._policy = engine, policy.shard_by, policy
        self.locals = [param.tensor for param in engine.local_params]
        self.index_of = {id(p.tensor): i for i, p in enumerate(engine.params)}
        self.index_of |= {id(local): i for i, local in enumerate(self.locals)}
        apart = {name for _, names in engine.policy.named_groups for name in names}
        self._apart = {i for i, param in enumerate(engine.params) if param.name in apart}
        timeout = Env.read().agree_timeout
        self.place = make_rendezvous(engine.group, "sharded optimizer", timeout)
        self.others = Others(engine.group, self.place.name)
        meeting = make_rendezvous(engine.group, "gradients", timeout)
        statements = engine.shares.make_statements(timeout)
        self.exchange = Exchange(engine.group, meeting, statements, engine.local_params)
        dtensors = {id(local): p.tensor for local, p in self._pairs() if local is not p.tensor}
        self.shard_group = ShardGroup(self.exchange, dtensors)
        self._sharded: weakref.WeakKeyDictionary[Optimizer, ShardedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        ranks, doubled = tuple(range(engine.group.size())), engine.policy.elastic is not None
        self.partition = Partition(ranks, engine.group.rank(), doubled)
        self.delivery = Delivery(engine)
        self._buckets = _bucket_numbers(engine)
        self._homes = self._make_homes()
        engine.locals.move()
        self.taken = 0
        self.saved_locally: set[int] | None = None
        watch_steps(self)

    def replaces(self, optimizer: Optimizer) -> bool:
        """Return whether it steps on parameters of the model."""
        return any(self.shares_steps(p) for p in params_of(optimizer))

    def _make_homes(self) -> list[tuple[list[torch.Tensor], Home | None]]:
        """Place the parameters in memory as an optimizer over all of them will cut them.

        The home is None where views of the parameters exist.
        """
        for local in self.locals:
            if self.shares_steps(local):
                fill_memory(local)
        if self.partition.doubled or self.partition.size == 1:
            return []
        shared = ((t, p) for t, p in self._pairs() if self.shares_steps(t))
        trained = [t for t, p in shared if p.tensor.requires_grad and not p.sparse]
        kinds = self._by_kind(trained, self.unit == "tensor", self._buckets)
        homes: list[tuple[list[torch.Tensor], Home | None]] = []
        for kind, params in kinds.items():
            sharing = self.sharing(kind.dtype, self.partition.size, kind.whole, True)
            dtensors = self.shard_group.dtensors  # which have a tensor over the same memory
            stay = any(has_views(param, 1 + (id(param) in dtensors)) for param in params)
            homes.append((params, None if stay else Home(params, self.partition.size, sharing)))
        return homes

    def _pairs(self) -> Iterator[tuple[torch.Tensor, NamedParam]]:
        """Yield the engine's parameters, each after what the ranks share of it."""
        yield from zip(self.locals, self.engine.params, strict=True)

    def local(self, param: torch.Tensor) -> torch.Tensor:
        """Return what the ranks share of a parameter: of a DTensor of the model, its local
        tensor.
        """
        index = self.index_of.get(id(param))
        return param if index is None else self.locals[index]

    def param(self, local: torch.Tensor) -> torch.Tensor:
        """Return the parameter that optimizers know, of what `local` returns."""
        return self.engine.params[self.index_of[id(local)]].tensor

    def _by_kind(
        self, params: Sequence[torch.Tensor], whole: bool, buckets: Mapping[int, int]
    ) -> dict[_Kind, list[torch.Tensor]]:
        """Group parameters that can lie in one buffer and be cut alike, and whose gradients come
        together.

        Args:
            params: some of `locals`.
            whole: each has one owner. Those with sparse gradients always have.
            buckets: see `_bucket_numbers`.
        """
        kinds: dict[_Kind, list[torch.Tensor]] = {}
        for param in params:
            index = self.index_of[id(param)]
            alone = whole or self.engine.params[index].sparse
            bucket = None if alone else buckets.get(index)
            kinds.setdefault(_Kind(param.dtype, param.device, alone, bucket), []).append(param)
        return kinds

    def make_buffers(self, params: Sequence[torch.Tensor], whole: bool) -> list[FlatBuffer]:
        """Return the parameters that can be cut together, in order, and where they lie. Collective.

        The same as when the model was wrapped, for parameters that have been trained since then.
        """
        first_new = 1 + max(self._buckets.values(), default=-1)
        later = {i: n + first_new for i, n in _bucket_numbers(self.engine).items()}
        buckets = {**later, **self._buckets}
        found: list[tuple[_Kind, list[torch.Tensor], Home | None]] = []
        for kind, members in self._by_kind(params, whole, buckets).items():
            ids = set(map(id, members))
            homes = (each for each in self._homes if ids == set(map(id, each[0])))
            ordered, home = next(homes, (members, None))
            sharing = self.sharing(kind.dtype, self.partition.size, kind.whole, True)
            if home is not None and not home.fits(lay_out(ordered, self.partition.size, sharing)):
                home = None
            found.append((kind, ordered, home))
        agreed = [True] * len(found)
        if self._homes:  # a rank may keep views, or have moved parameters, alone
            place, mine = "the sharing of an optimizer's state", [h is not None for *_, h in found]
            everyones = gather_watched(mine, self.engine.group, place)
            agreed = [all(flags) for flags in zip(*everyones, strict=True)]
        buffers = []
        for (kind, ordered, home), alike in zip(found, agreed, strict=True):
            gradients = kind.bucket is not None
            sharing = self.sharing(kind.dtype, self.partition.size, kind.whole, gradients)
            buffers.append(FlatBuffer(ordered, self.partition, sharing, home if alike else None))
        return buffers

    def shares_steps(self, param: torch.Tensor) -> bool:
        """Return whether the ranks share the steps on a parameter.

        They do on those of the model, but not on parameters of `groups`, which other ranks do not
        have, nor on integers, such as codes of a quantised layer, on which no optimizer steps.
        """
        index = self.index_of.get(id(param))
        if index is None or index in self._apart:
            return False
        return param.is_floating_point() or param.is_complex()

    def replace_step(self, optimizer: Optimizer, args: Arguments) -> Arguments | None:
        """Return what `step` shall be called with instead; None where it is none of ours."""
        if args[0] is not optimizer:
            return None  # another wrapper of the same parameters makes this step
        if backward_is_running():
            raise RuntimeError(
                "zero cannot step inside a backward: the ranks exchange parameters after a step, "
                "and their backwards reach it at different times; step after backward(), or use "
                "zero=0"
            )
        arguments = with_loss(args)
        sharded = self.attach(optimizer)
        self.engine.locals.begin()
        ours = map(self.local, filter(self.shares_steps, params_of(optimizer)))
        check_averaged(ours, self.engine, self.exchange)
        return sharded.arguments(optimizer, arguments)

    def attach(self, optimizer: Optimizer) -> ShardedOptimizer:
        """Spread its state over the ranks, unless that has been done. Collective."""
        sharded = self._sharded.get(optimizer)
        if sharded is None or not sharded.fits(optimizer):
            self._check_dtensors(optimizer)
            # Since wrapping, a script may have assigned one parameter's `.data` to another.
            check_untied(((p.name, local) for local, p in self._pairs()), "or use zero=0")
            self.make_gradients_whole()
            if sharded is not None:
                sharded.detach(optimizer)
            sharded = self._sharded[optimizer] = ShardedOptimizer(self, optimizer)
            self._share_gradients(sharded.buffers)
        return sharded

    def _check_dtensors(self, optimizer: Optimizer) -> None:
        """Check that this rank may step on the local tensors of DTensors.

        Raises:
            ValueError: it may not.
        """
        cut = any(is_cut(param) for param in params_of(optimizer) if self.shares_steps(param))
        if cut and _unit_for(optimizer, self.unit) == "tensor":
            kind = type(optimizer)
            raise ValueError(
                f"zero=1 and 2 step on each rank's part of a DTensor, and an update of "
                f"{kind.__module__}.{kind.__qualname__} depends on all parts; use zero=0, or an "
                "optimizer such as AdamW"
            )

    def find(self, optimizer: Optimizer, moved: bool = False) -> ShardedOptimizer | None:
        """Return what spreads the state of an optimizer.

        None before its first step, and where it steps on other parameters by now.

        Args:
            moved: the parameters may lie elsewhere by now, as after `p.data = t`.
        """
        sharded = self._sharded.get(optimizer)
        if sharded is None:
            return None
        same = sharded.knows(optimizer) if moved else sharded.fits(optimizer)
        return sharded if same else None

    def forget(self) -> None:
        """Release all optimizers. The state that this rank has for its pieces is lost."""
        for optimizer, sharded in self.known():
            sharded.take_state(optimizer)
            sharded.let_go(optimizer)
        self._sharded.clear()
        self.taken = 0

    @contextmanager
    def settings_alone(self) -> Iterator[set[int]]:
        """Make `optimizer.state_dict()` within local, without any of the spread state.

        Yields:
            The numbers of the optimizers for which that has been so.
        """
        self.saved_locally = set()
        try:
            yield self.saved_locally
        finally:
            self.saved_locally = None

    def known(self) -> list[tuple[Optimizer, ShardedOptimizer]]:
        """Return the optimizers that have been taken over and are still alive."""
        return list(self._sharded.items())

    def sharing(self, dtype: torch.dtype, shares: int, whole: bool, gradients: bool) -> Sharing:
        """Return what the ranks do with parameters of a dtype, cut into so many shares."""
        wire = FORMATS.get(self._policy.parameter_wire or "")
        if shares == 1 or (wire and not travels_coded(wire, dtype)):
            wire = None
        masters = wire is not None or (self._policy.master_weights and dtype in NARROW)
        return Sharing(gradients and dtype.is_floating_point, masters, wire, whole)

    def meet(self, call: str, remedy: str) -> None:
        """Return once every rank has made this call, which exchanges what zero has spread.

        Raises:
            RuntimeError: some do not come, or have made another.
        """
        if not self.place.meet(f"{call}, whose state zero spreads over the ranks", call, remedy):
            raise RuntimeError(
                f"rank {number_of(self.engine.group)} calls {call}, but another rank something "
                f"else that exchanges what zero has spread over the ranks. {remedy}"
            )

    def meet_again(self) -> None:
        """Let the ranks meet, for what `meet` says, in the process group that
        the engine has now.
        """
        timeout, former = Env.read().agree_timeout, self.others.group.group_name
        self.place = make_rendezvous(self.engine.group, "sharded optimizer", timeout)
        self.others = Others(self.engine.group, self.place.name, former)
        for _, sharded in self.known():
            sharded.serve()

    def make_gradients_whole(self) -> None:
        """Put whole gradients on every rank. Collective where they are spread."""
        self.engine.locals.begin()
        make_whole(self.locals)
        self.engine.locals.finish()

    def _share_gradients(self, buffers: Sequence[FlatBuffer]) -> None:
        """Make the ranks share the gradients of what is cut by elements, too. Collective."""
        if not self.engine.policy.shardable or self.engine.group.size() == 1:
            return
        taken = {id(param) for buffer in buffers for param in buffer.params}
        ours = [
            unit
            for unit in self.shard_group.units
            if unit.buffer.is_intact() and not any(id(param) in taken for param in unit.params)
        ]
        fresh = [buffer for buffer in buffers if buffer.sharing.gradients]
        self.shard_group.units = [*ours, *(GradientShards(b, self.shard_group) for b in fresh)]
        self.engine.shard(
            [
                ShardedUnit(
                    [self.index_of[id(param)] for param in unit.params],
                    unit.buffer.layout.offsets,
                    unit.buffer.layout.region,
                    unit.core,
                )
                for unit in self.shard_group.units
            ]
        )

    def within_step(self, hooks: Sequence[Callable[..., Any]]) -> None:
        """Refuse hooks that would run before the ranks have exchanged parameters.

        Raises:
            RuntimeError: there are some.
        """
        if hooks:
            raise RuntimeError(
                "step() of this optimizer calls step() of its base class, so torch calls the hooks "
                "of register_step_pre_hook() and register_step_post_hook() twice, once before the "
                "ranks have exchanged what zero has them update; do after step() what these hooks "
                "do, or use zero=0"
            )

    def end_step(self, optimizer: Optimizer) -> None:
        """Exchange what the step has updated, before hooks of the script look at it."""
        sharded = self._sharded.get(optimizer)
        if sharded is not None:
            sharded.end_step(optimizer)


class ShardedOptimizer:
    """One optimizer, taken over. Lives as long as it does, and must not keep it alive.

    Attributes:
        number: of those that have been taken over, on all ranks alike.
        steps: those that this rank has made since.
        partition: ranks that share the state.
        blank: it has made no step and loaded nothing, here or before; the same on all ranks.
        masters: of what it steps on here, those that are fp32 masters.
        slices: what `optimizer.state` says of its parameters.
    """

    def __init__(self, owner: ShardedOptimizers, optimizer: Optimizer) -> None:
        self._owner, self._optimizer = owner, weakref.ref(optimizer)
        owner.taken += 1
        self.number, self.steps = owner.taken, 0
        self._unit = _unit_for(optimizer, owner.unit)
        groups = optimizer.param_groups
        self._full = [[owner.local(param) for param in group["params"]] for group in groups]
        self._proxy: Optimizer | None = None
        params = [p for group in self._full for p in group if owner.shares_steps(p)]
        buffers = owner.make_buffers(params, self._unit == "tensor")
        self.shares, self._let_go = StateShards(optimizer), False
        self._fetched = -1  # the version that this rank has fetched since it came to a change
        self._view = StateView({})
        self.use(owner.partition, buffers)
        self.blank = True
        self._loaded: dict[int, State] = {}  # by the id of its parameter
        self._cut_state(optimizer)
        self._hooks = (
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded),
            optimizer.register_load_state_dict_post_hook(self._end_load),
        )
        self.serve()

    def use(self, partition: Partition, buffers: Sequence[FlatBuffer]) -> None:
        """Step on what this rank has of these buffers from now on."""
        self.partition, self.buffers = partition, list(buffers)
        self._pieces: dict[int, list[nn.Parameter]] = {
            id(param): [] for buffer in buffers for param in buffer.params
        }
        self._places: dict[torch.Tensor, tuple[FlatBuffer, Slice]] = {}
        for buffer in self.buffers:
            for piece, tensor in buffer.owned.items():
                self._pieces[id(buffer.params[piece.param])].append(tensor)
                self._places[tensor] = (buffer, piece)
        self.masters = {t for t, (buffer, _) in self._places.items() if buffer.sharing.masters}
        self.shares.use(partition, self.buffers)
        before = getattr(self, "slices", None)
        full = [local for group in self._full for local in group if id(local) in self._pieces]
        order = {self._owner.param(local): local for local in full}
        exchange = self._owner.exchange
        # A cycle would keep the model until it is collected.
        made_of_self = weakly(self._first_state), weakly(self._alike), weakly(self._writing)
        self.slices = Slices(buffers, exchange, order, *made_of_self)
        self._view.slices = [each for each in self._view.slices if each is not before]
        self._view.slices.append(self.slices)

    def _first_state(self, buffer: FlatBuffer, index: int) -> State | None:
        """Return the state after a first step on a parameter; without elements where it is cut."""
        optimizer, param = self._optimizer(), buffer.params[index]
        assert optimizer is not None
        owner = self._owner
        if buffer.sharing.whole:
            sparse = owner.engine.params[owner.index_of[id(param)]].sparse
            layout = torch.sparse_coo if sparse else torch.strided
            gradient = torch.zeros_like(param, layout=layout, requires_grad=False)
        else:
            gradient = torch.zeros(0, dtype=param.dtype, device=param.device)
        if buffer.sharing.masters:
            gradient = gradient.float()
        groups: list[dict[str, torch.Tensor]] = [
            {"": gradient} if any(p is param for p in group) else {} for group in self._full
        ]
        return first_state(optimizer, groups).get("")

    def _alike(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return what this rank steps on of the parameters in the same group."""
        group = next(group for group in self._full if any(p is param for p in group))
        return [tensor for p in group for tensor in self._pieces.get(id(p), ())]

    def sharing(self, buffer: FlatBuffer, shares: int) -> Sharing:
        """Return what the ranks do with a buffer once it is cut into so many shares."""
        now = buffer.sharing
        return self._owner.sharing(buffer.dtype, shares, now.whole, now.gradients)

    def fits(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer steps on the parameters that it was taken over with, and
        they lie where they did.
        """
        return self.knows(optimizer) and all(buffer.is_intact() for buffer in self.buffers)

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether it steps on these parameters, wherever they lie now."""
        groups = [group["params"] for group in optimizer.param_groups]
        return len(groups) == len(self._full) and all(
            len(now) == len(then)
            and all(self._owner.local(a) is b for a, b in zip(now, then, strict=True))
            for now, then in zip(groups, self._full, strict=True)
        )

    def arguments(self, optimizer: Optimizer, args: Arguments) -> Arguments:
        """Return the arguments for `step`: a proxy, whose groups hold the pieces.

        It has the optimizer's class, settings and state. The optimizer itself stays as it is, even
        where the step raises. What is not the model's stays in the groups. See [Note: steps one
        after the other].
        """
        if optimizer.state is not self._view:  # the script has set another one
            self._cut_state(optimizer)
        self._owner.delivery.begin()
        self.begin_change()
        *ahead, last = [[buffer] for buffer in self.buffers]
        if not _steps_by_parameter(optimizer):
            ahead, last = [], self.buffers
        tensors = {id(t) for buffer in last for t in buffer.owned.values()}
        tensors |= {id(p) for p in params_of(optimizer) if self._pieces_of(p) is None}
        self._proxy = self._optimizer_proxy(optimizer, tensors)
        if not ahead:
            self._begin(last)
            return (self._proxy, *args[1:])
        given = args[1] if len(args) > 1 else None

        def closure() -> Any:
            for buffers in ahead:
                self._step_ahead(optimizer, buffers)
            self._begin(last)
            return given() if given is not None else None

        return (self._proxy, closure, *args[2:])

    def _pieces_of(self, param: torch.Tensor) -> list[nn.Parameter] | None:
        """Return what this rank steps on of a parameter; None: it is not the model's."""
        return self._pieces.get(id(self._owner.local(param)))

    def _optimizer_proxy(self, optimizer: Optimizer, tensors: set[int]) -> Optimizer:
        """Return a proxy that steps on those of the pieces, and of what is not the model's, in
        `tensors`.
        """
        groups = []
        for group in optimizer.param_groups:
            found = ((param, self._pieces_of(param)) for param in group["params"])
            pieces = (t for param, its in found for t in ([param] if its is None else its))
            groups.append({**group, "params": [t for t in pieces if id(t) in tensors]})
        proxy = optimizer_proxy(optimizer, groups)
        proxy.state = self._view.held  # type: ignore[assignment]
        return proxy

    def _begin(self, buffers: Sequence[FlatBuffer]) -> None:
        for buffer in buffers:
            buffer.begin_step()
            gather_foreign(buffer)
            lend_gradients(buffer)
            self.slices.note_step(buffer)
            stepped = self.masters & set(buffer.owned.values())
            self.shares.stepped |= {tensor for tensor in stepped if tensor.grad is not None}

    def _end(self, buffers: Sequence[FlatBuffer]) -> None:
        for buffer in buffers:
            for gathered, arrived in buffer.end_step():
                self._owner.delivery.start(self.number, gathered, arrived)

    def _step_ahead(self, optimizer: Optimizer, buffers: Sequence[FlatBuffer]) -> None:
        self._begin(buffers)
        tensors = {id(t) for buffer in buffers for t in buffer.owned.values()}
        with torch.no_grad():
            plain_step(self._optimizer_proxy(optimizer, tensors))
        self._end(buffers)

    def end_step(self, optimizer: Optimizer) -> None:
        """Hand over what the step has set, and exchange what it has updated. Collective."""
        proxy, self._proxy = self._proxy, None
        if proxy is None:
            return
        for group, changed in zip(optimizer.param_groups, proxy.param_groups, strict=True):
            group.update({name: value for name, value in changed.items() if name != "params"})
        self._view.held = proxy.state
        kept = {"param_groups": optimizer.param_groups, "state": self._view}
        optimizer.__dict__.update({**proxy.__dict__, **kept})
        self.mark_used()
        self._end(self.buffers[-1:] if _steps_by_parameter(optimizer) else self.buffers)
        stepped = [p for p in params_of(optimizer) if is_dtensor(p) and p.grad is not None]
        increment_version(stepped)  # as of what they are made of
        self._owner.engine.locals.finish()
        self.steps += 1
        self.end_change(optimizer)
        self._owner.delivery.finish(self.number)

    def mark_used(self) -> None:
        """Say that there is a state, be it empty.

        Torch's `get_optimizer_state_dict` makes a step where an optimizer has none.
        """
        self.blank, self._view.used = False, True

    def saved(self, optimizer: Optimizer, tensor: torch.Tensor) -> State:
        """Return the state of a piece as checkpoints hold it: with its master, once stepped on.

        Args:
            tensor: the piece, or a parameter that is not shared.
        """
        held = held_state(optimizer)
        if tensor not in self._places:
            return dict(held.get(tensor, {}))
        buffer, piece = self._places[tensor]
        return self.shares.saved(tensor, buffer.loaded_master(piece), held)

    def take_master(self, tensor: torch.Tensor, state: Mapping[str, Any]) -> State:
        """Take the master of what `saved` returned; return the rest. Without one it follows the
        parameter."""
        if MASTER in state and tensor in self._places:
            buffer, piece = self._places[tensor]
            if buffer.load_master(piece, state[MASTER]):
                self.shares.stepped.add(tensor)
        return {name: value for name, value in state.items() if name != MASTER}

    def detach(self, optimizer: Optimizer) -> None:
        """Restore the whole state, as if the optimizer had not been taken over. Collective."""
        whole: dict[torch.Tensor, State] = {}
        group, state_of = self._owner.engine.group, partial(self.saved, optimizer)
        collect = partial(whole_states, self.buffers, state_of, group)
        self._owner.delivery.until_all(lambda: whole.update(collect()))
        self.take_state(optimizer)
        self.let_go(optimizer)
        optimizer.state.update(self._placed(whole))

    def _placed(self, whole: Mapping[torch.Tensor, State]) -> dict[torch.Tensor, State]:
        """Return states by the parameters that the optimizer has, placed as these are."""
        pairs = ((self._owner.param(local), state) for local, state in whole.items())
        return {
            param: {name: placed_value(value, param, name) for name, value in state.items()}
            for param, state in pairs
        }

    def _local(self, param: torch.Tensor, state: State | None) -> State | None:
        """Return this rank's part of a parameter's state."""
        if state is None:
            return None
        return {name: local_value(value, param) for name, value in state.items()}

    def let_go(self, optimizer: Optimizer) -> None:
        """End any part in what the optimizer saves and loads."""
        self._let_go = True
        self.shares.gate.begin()
        for hook in self._hooks:
            hook.remove()
        self._view.slices.remove(self.slices)
        if optimizer.state is self._view and not self._view.slices:
            optimizer.state = self._view.held  # type: ignore[assignment]

    def __del__(self) -> None:
        """Keep the shares' links: hooks of the optimizer keep this alive, so it has died, too."""
        if not getattr(self, "_let_go", True):
            self.shares.outlive()

    def serve(self) -> None:
        """Let the other ranks ask for the shares that this one has."""
        self.shares.serve(self._owner.others, self.number)

    def begin_change(self) -> None:
        """Wait until no rank reads the state, and let none read it before `end_change`."""
        self._come_to_change()
        self.shares.gate.begin()

    def _come_to_change(self) -> None:
        """Wait for the others where this rank has fetched: they may still read its state."""
        self.shares.gate.arrive()
        self._await_others()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Prepare a change of values of the state by the script, between two steps."""
        gate = self.shares.gate
        if gate.changing:
            yield
            return
        gate.arrive_to_write()
        self._await_others()
        gate.begin_write()
        try:
            yield
        finally:
            gate.end_write()

    def _await_others(self) -> None:
        if self._fetched == self.shares.gate.version and self.partition.size > 1:
            await_others(self.partition, self.shares, self._owner.others, self.number)
        self._fetched = -1

    def end_change(self, optimizer: Optimizer) -> None:
        """Complete a change of the state: a step, or the loading of one. The ranks count them."""
        self.shares.end_change(optimizer, self.buffers[0].params[0].device)

    def _end_load(self, optimizer: Optimizer) -> None:
        self.begin_change()
        self._cut_state(optimizer)
        self.end_change(optimizer)

    def _cut_state(self, optimizer: Optimizer) -> None:
        """Keep of the state of whole parameters what belongs to this rank's pieces."""
        loaded, self._loaded = self._loaded, {}
        if not isinstance(optimizer.state, StateView):
            self._view.held = optimizer.state
            optimizer.state = self._view  # type: ignore[assignment]
        elif optimizer.state is not self._view:  # of another wrapper's parameters
            optimizer.state.slices.append(self.slices)
            self._view = optimizer.state
        held = self._view.held
        for buffer in self.buffers:
            params = list(map(self._owner.param, buffer.params))
            whole = [self._local(param, held.pop(param, None)) for param in params]
            if buffer.sharing.masters:
                its = [self._local(param, loaded.get(id(param))) for param in params]
                whole = [of_master(*pair) for pair in zip(whole, its, strict=True)]
            self.blank = self.blank and not any(whole)
            alone = buffer.sharing.whole
            received = [
                described(p, state, alone) for p, state in zip(buffer.params, whole, strict=True)
            ]
            self.learn(buffer, dict(enumerate(received)))
            for piece, tensor in buffer.owned.items():
                if values := whole[piece.param]:
                    param = buffer.params[piece.param]
                    mine = {n: cut_value(buffer, piece, param, v) for n, v in values.items()}
                    if rest := self.take_master(tensor, mine):
                        held[tensor] = rest
        if not self.blank:
            self.mark_used()

    def learn(self, buffer: FlatBuffer, known: Mapping[int, State | None]) -> None:
        """Take what ranks without elements of a parameter have to know; see `described`."""
        for index, param in enumerate(buffer.params):
            self.slices.learn(param, known.get(index))

    def tell(self, optimizer: Optimizer) -> None:
        """Tell all ranks of the state that each has for its own pieces. Collective."""
        held, group = held_state(optimizer), self._owner.engine.group
        for buffer in self.buffers:
            mine: dict[int, State | None] = {}
            for piece, tensor in buffer.own.items():
                state, param = held.get(tensor), buffer.params[piece.param]
                if state and tensor.shape != param.shape:
                    state = {n: buffer.outline(piece.param, tensor, v) for n, v in state.items()}
                mine[piece.param] = described(param, state, buffer.sharing.whole)
            known: dict[int, State | None] = {}
            for received in gather_watched(mine, group, "the state of an optimizer"):
                known.update((i, state) for i, state in received.items() if state is not None)
            self.learn(buffer, known)

    def take_state(self, optimizer: Optimizer) -> dict[torch.Tensor, State]:
        """Remove what the optimizer has for this rank's pieces, and return it."""
        held = held_state(optimizer)
        return {
            tensor: held.pop(tensor)
            for buffer in self.buffers
            for tensor in buffer.owned.values()
            if tensor in held
        }

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        """Get the whole state for torch's part of state_dict(). See `settings_alone`."""
        if self._owner.saved_locally is not None:
            self._owner.saved_locally.add(self.number)
            self.shares.aside = self.take_state(optimizer)
            optimizer.state = held_state(optimizer)  # type: ignore[assignment]
            return

        whole = self.fetch()
        with self.shares.gate.moving:
            self.shares.aside = self.take_state(optimizer)
            optimizer.state = held_state(optimizer)  # type: ignore[assignment]
            optimizer.state.update(whole)

    def fetch(self) -> dict[torch.Tensor, State]:
        """Return the state of whole parameters, from the ranks that have it. Not collective.

        Raises:
            RuntimeError: this rank or another is not between two steps.
        """
        if self.shares.gate.changing:
            raise RuntimeError(
                "the state of an optimizer that zero spreads over the ranks can be had between two "
                "steps, but one has begun and not come to its end; call optimizer.state_dict() "
                "before or after step()"
            )
        with torch.no_grad():
            others = self._owner.others
            whole = fetch_whole(self.buffers, self.partition, self.shares, others, self.number)
        self._fetched = self.shares.gate.version
        return self._placed(whole)

    def _after_state_dict(self, optimizer: Optimizer, _: object) -> None:
        held = held_state(optimizer)
        with self.shares.gate.moving:
            for buffer in self.buffers:
                for param in buffer.params:
                    held.pop(self._owner.param(param), None)
            held.update(self.shares.aside)
            self.shares.aside = {}
            optimizer.state = self._view  # type: ignore[assignment]

    def _check_loaded(self, optimizer: Optimizer, loaded: State) -> None:
        """Refuse torch's flattened form, which needs the optimizer's state of whole parameters.

        Keep the loaded state as it is.
        """
        states = loaded.get("state", {})
        held = held_state(optimizer)
        ours = (held.get(t) for buffer in self.buffers for t in buffer.owned.values())
        if states and not any(states.values()) and any(ours):
            raise ValueError(
                "the state to load has no values, but the optimizer has a state. If it comes from "
                "StateDictOptions(flatten_optimizer_state_dict=True), which zero cannot load, "
                "leave that option out"
            )
        saved = [key for group in loaded.get("param_groups", []) for key in group["params"]]
        pairs = zip(saved, params_of(optimizer), strict=False)
        self._loaded = {id(param): states[key] for key, param in pairs if key in states}
        self._come_to_change()
        self.shares.loading = True


def _bucket_numbers(engine: Engine) -> dict[int, int]:
    """Return, by parameter index, the number of the bucket that its gradient travels in.

    Where ranks may die, of a buffer that depends on nothing else: plans follow the number of ranks,
    and one may take an optimizer over before a death, another after it.
    """
    if engine.policy.elastic is not None:
        sizes = [param.tensor.nbytes for param in engine.params]
        ends = enumerate(accumulate(sizes))
        return {index: (end - sizes[index]) // _BUFFER for index, end in ends}
    buckets = enumerate(engine.plan.buckets)
    return {index: number for number, bucket in buckets for index in bucket.params}


def _steps_by_parameter(optimizer: Optimizer) -> bool:
    """Return whether it may step on its parameters in turns: each update concerns one parameter
    alone.
    """
    known = is_elementwise(optimizer) or type(optimizer) in known_optimizers(_TENSORWISE)
    return known and hasattr(type(optimizer).step, "__wrapped__")


def _unit_for(optimizer: Optimizer, shard_by: str) -> str:
    """Return the pieces that `optimizer` can step on: "element" or "tensor".

    Args:
        shard_by: `Zero.shard_by`; anything but "auto" is taken as the user's word.

    Raises:
        ValueError: the class is not known, or couples parameters.
    """
    if shard_by != "auto":
        return shard_by
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "zero cannot shard LBFGS, whose step takes all parameters at once; use zero=0"
        )
    if is_elementwise(optimizer):
        return "element"
    if kind in known_optimizers(_TENSORWISE):
        return "tensor"
    raise ValueError(
        f"zero does not know how {kind.__module__}.{kind.__qualname__} may be sharded. Pass "
        "zero=Zero(stage, shard_by='element') if each element's update depends on that element "
        "alone (as in SGD and Adam), shard_by='tensor' if it depends on other elements of the "
        "same parameter (as in LAMB, Muon and Shampoo), or zero=0 if it depends on other parameters"
    )
