"""Work around the forward and backward of a module that fully_shard() was applied to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastsync._torch import (
    at_end_of_backward,
    backward_is_running,
    creation_number,
    is_replicated,
    next_creation_number,
    outside_transforms,
    transforms_are_active,
    untraced,
)
from fastsync.fsdp.context import Context
from fastsync.fsdp.nested_tensors import grad_tensors, map_tensors, output_grad_tensors
from fastsync.fsdp.param_group import Moment, Unit
from fastsync.fsdp.sharded_param import Home, ShardedParam
from fastsync.reducer.registrations import registrations

Args = tuple[object, ...]
Kwargs = Mapping[str, object]
_ATTRIBUTE = "_fastsync_unit_state"


def state_of(module: nn.Module) -> State | None:
    """Return the state of a module that fully_shard() was applied to."""
    return cast("State | None", module.__dict__.get(_ATTRIBUTE))


class _UnitEnd(torch.autograd.Function):
    """Passes a forward's inputs on; its backward runs when the unit's backward has been done."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: State, counted: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: object) -> None:
        ctx.state, ctx.counted = inputs[:2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.state.reached_end(ctx.counted)
        return (None, None, *gradients)


class _UnitStart(torch.autograd.Function):
    """Passes an output on; its backward runs when the unit's backward begins."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: State, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[State, ...], output: object) -> None:
        ctx.state = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.state.before_backward(gradient)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.view_as(tangent)


class State:
    """State of the modules of one fully_shard() call; the states of a model share a context.

    Attributes:
        unit: the parameters; None where the modules have none of their own.
        uses: that unit, and those of other states that have a parameter which is tied to one here.
        auto_reshard: the script did not say whether the unit is kept between forward and backward,
            so the root's is kept.
        made_by: the function that a script has called, for messages.
        ignored: parameters that the script takes care of.
        forward_next, backward_next: states whose units are gathered next, by a script's wish.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        unit: Unit | None,
        mixed: MixedPrecisionPolicy,
        auto_reshard: bool,
        tied: Sequence[Unit],
    ) -> None:
        self.modules, self.unit, self.mixed = tuple(modules), unit, mixed
        self.uses = [*([] if unit is None else [unit]), *tied]
        self.auto_reshard = auto_reshard
        self.context = Context(self)
        self.is_root: bool | None = None  # known with the first forward
        self.moment = Moment.IDLE
        self._connected = False
        self.made_by = "fully_shard()"
        self.forward_next: list[State] = []
        self.backward_next: list[State] = []
        self._locals: dict[nn.Module, list[torch.Tensor]] = {}  # whose state dict is being loaded
        self.ignored: tuple[nn.Parameter, ...] = ()
        self._registrations: int | None = None  # when the layers were looked at
        self._missing: set[nn.Module] = set()  # of the group, in the forward that runs
        self._first_node = 0  # that autograd makes in that forward
        # That forward computes again, within a backward. It may have no end: a checkpoint stops
        # once it has all tensors that it needs.
        self._again = False
        for module in modules:
            module.__dict__[_ATTRIBUTE] = self
            self._hook(module)
        self._hook_dicts()

    def _hook(self, module: nn.Module) -> None:
        before = cast("Callable[..., None]", self.before_forward)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        grouped = len(self.modules) > 1
        module.register_forward_hook(self.after_forward, prepend=False, always_call=grouped)

    def _hook_dicts(self) -> None:
        """State dicts show shares, wherever in these modules a parameter of `uses` is."""
        inside = {below for module in self.modules for below in module.modules()}
        homes: dict[nn.Module, list[tuple[Home, ShardedParam]]] = {}
        for param in (param for unit in self.uses for param in unit.params):
            for home in param.homes:
                if home.module in inside:
                    homes.setdefault(home.module, []).append((home, param))
        for module, its in homes.items():
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(partial(self._before_load, its))
            module.register_load_state_dict_post_hook(partial(self._after_load, its))

    def _before_state_dict(self, *unused: object) -> None:
        for unit in self.uses:
            unit.reshard()

    def _before_load(
        self,
        homes: Sequence[tuple[Home, ShardedParam]],
        module: nn.Module,
        state: dict[str, object],
        prefix: str,
        *unused: object,
    ) -> None:
        """Cut whole tensors, as models that are not sharded have them, to this rank's share."""
        self._before_state_dict()
        self._locals[module] = [param.local for _, param in homes]
        for home, param in homes:
            whole = state.get(prefix + home.name)
            if isinstance(whole, torch.Tensor) and param.is_of_unsharded_size(whole):
                share = param.share_of(whole.detach()).to(param.local.device)
                state[prefix + home.name] = param.as_dtensor(share)

    def _after_load(
        self, homes: Sequence[tuple[Home, ShardedParam]], module: nn.Module, *unused: object
    ) -> None:
        """Take in what has replaced a share; mostly, its memory has been written to."""
        before = self._locals.pop(module, None)
        if before is not None and all(
            home.get() is param.sharded and param.local is local
            for (home, param), local in zip(homes, before, strict=True)
        ):
            return
        for unit in self.uses:
            unit.sync_params()
        if self.is_root is not None:
            self.context.connections.introduce(self.context.units())

    # --- the first forward

    def become_root(self) -> None:
        """Collect the states below, unless this one has a place already.

        Raises:
            RuntimeError: one of them has run a forward as a root.
        """
        if self.is_root is not None:
            if self.is_root and not self._connected:
                self.connect()
            return
        if len(self.modules) > 1:
            raise RuntimeError(
                f"FSDP requires a single root module but got {self.modules}: apply fully_shard() "
                "to the module that holds them, too, or run its forward first"
            )
        self.is_root = True
        self.context.states = []
        for name, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is None:
                continue
            elsewhere = state.is_root is not None and state.context is not self.context
            if state is not self and elsewhere:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires "
                    "running forward through the root module first"
                )
            if state not in self.context.states:
                self.context.states.append(state)
                state.join(self.context, state is self)
        if self.auto_reshard and self.unit is not None:
            self.unit.switches.reshard_after_forward = False
            self.unit.kept_by_default = True
        self._name()
        self.connect()

    def join(self, context: Context[State], as_root: bool) -> None:
        """Join the states of `context`, which follows the settings of this one from now on."""
        if context is not self.context and self.context.recorder is not None:
            raise RuntimeError(
                "a timeline was asked for of a module that is no root: call record_timeline() on "
                "the outermost module of fully_shard()"
            )
        if context is not self.context:
            context.merge(self.context)
        self.is_root, self.context = as_root, context

    def _name(self) -> None:
        root = self.modules[0]
        names = {id(param): name for name, param in root.named_parameters()}
        modules = {module: name for name, module in root.named_modules()}
        for unit in self.context.units():
            unit.name = ", ".join(modules.get(m, type(m).__name__) for m in unit.modules)
            for param in unit.params:
                for tensor in (param.sharded, param.unsharded):
                    param.name = names.get(id(tensor), param.name)

    def connect(self) -> None:
        """Prepare everything below to be gathered. Collective the first time."""
        for unit in self.context.units():
            self.context.connections.connect(unit, self.context.units())
            unit.watch_with(self.context.gradients)
            if not unit.is_unsharded:
                unit.sync_params()
            for dtype_shard in unit.dtype_shards:
                dtype_shard.check_memory()
        self.context.connections.introduce(self.context.units())
        self._connected = True

    # --- forward

    @untraced
    def before_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Make the parameters whole before the forward."""
        in_backward = self.moment is Moment.BEFORE_BACKWARD and backward_is_running()
        if in_backward:  # checkpointing computes it again
            self._gather()
            return self._cast_inputs(args, kwargs)
        if not self._missing:
            self._missing = set(self.modules)
        failed = self.context.root_forward is self and not self._goes_on(module)
        first = self.moment is not Moment.FORWARD or failed
        if first:
            self._again = backward_is_running()
            self._begin_root_forward()
            self._refresh()
        self.moment = Moment.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        if not first:
            self._gather()
            return args, kwargs
        with outside_transforms():
            self.context.gather(self.uses, self._prefetch_forward)
        for unit in self.uses:
            unit.running += not self._again
        self._first_node = next_creation_number()
        if torch.is_grad_enabled() and self.uses:
            args, kwargs = self._mark_end(args, kwargs)
        return args, kwargs

    def _goes_on(self, module: nn.Module) -> bool:
        """Return whether others of the group have run in this forward, and this one is still to
        come.
        """
        return module in self._missing and len(self._missing) < len(self.modules)

    def _refresh(self) -> None:
        if not self._again:  # a backward computes with what forward had
            for unit in self.uses:
                unit.refresh()

    def _gather(self) -> None:
        with outside_transforms():
            self.context.gather(self.uses)

    def _begin_root_forward(self) -> None:
        self.become_root()
        if self.context.root_forward is self and not self._again:  # its last one failed half-way
            self._recover()
        if self.context.root_forward is None:
            if self.context.ending and not self._again and not self.context.faulty:
                self._forget_failed()
            if self._registrations != registrations():
                self.check_layers()
            self.context.root_forward = self
            self.context.begin_forward(self._again, torch.is_grad_enabled())

    def check_layers(self) -> None:
        """
        Raises:
            RuntimeError: a parameter below that requires a gradient belongs to no unit.
        """
        self._registrations = registrations()
        if not self.is_root:
            return
        known = {id(param) for state in self.context.states for param in state.ignored}
        known |= {id(p) for unit in self.context.units() for p in unit.parameters()}
        root = self.modules[0]
        for name, module in root.named_modules():
            state = state_of(module)
            if is_replicated(module):
                known.update(map(id, module.parameters()))
            elif state is not None and state.context is not self.context:
                known |= {id(p) for unit in state.uses for p in unit.parameters()}
            for own, param in module._parameters.items():
                if param is not None and param.requires_grad and id(param) not in known:
                    full = f"{name}.{own}" if name else own
                    raise RuntimeError(
                        f"parameter {full!r} was added to the model, or took the place of another, "
                        f"after fully_shard() was applied to this {kind_of(root)}, so that it is "
                        "not synchronised and each rank would train its own; change layers before "
                        "the model is wrapped, freeze the parameter, or put it into ignored_params"
                    )

    def _recover(self) -> None:
        self.context.root_forward = None
        for state in self.context.states:
            state.moment = Moment.IDLE
            state._missing = set(state.modules) if state is self else set()
            for unit in state.uses:
                unit.running = 0
                if not unit.stays:  # a script may have written to the shares since
                    unit.reshard()
        self.context.forget_prefetched()

    def _prefetch_forward(self) -> None:
        for state in self.forward_next:
            if state.unit is not None:
                self.context.prefetch_forward(state.unit)
        if self.unit is not None and not self.forward_next and not self._again:
            self.context.enter(self.unit)

    def _mark_end(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Let the backward say when it is through with this forward."""
        # Checkpointing computes again in backward what has been counted, or ran without gradients.
        counted = not self._again
        for unit in self.uses:
            unit.expected += counted
        inputs = grad_tensors((args, kwargs))
        if not inputs:
            return args, kwargs
        apply = cast("Callable[..., Iterable[torch.Tensor]]", _UnitEnd.apply)
        marked = iter(apply(self, counted, *inputs))
        return map_tensors(lambda t: next(marked) if t.requires_grad else t, (args, kwargs))

    @untraced
    def after_forward(self, module: nn.Module, args: Args, output: object) -> object:
        """Release the parameters after the forward; a backward that reaches the output gets them
        back.
        """
        if self.moment is Moment.BEFORE_BACKWARD:
            return self._cast_output(output)
        self._missing.discard(module)
        if self._missing:
            return self._cast_output(output)  # other modules of the group are still to come
        return self._end_forward(output)

    def _end_forward(self, output: object) -> object:
        found = output_grad_tensors(output) if torch.is_grad_enabled() else []
        for unit in self.uses:
            unit.running -= not self._again
            if not self._again:
                self._let_go(unit, bool(found))
        output = self._mark_start(output, found)
        self.moment = Moment.IDLE
        if self.context.root_forward is self:
            output = self._complete_groups(output)
            if not self._again:
                self.context.end_forward()
            self.context.root_forward = None
        return self._cast_output(output)

    def _let_go(self, unit: Unit, has_outputs: bool) -> None:
        """
        Args:
            has_outputs: the forward returned tensors that require a gradient.
        """
        with_backward = torch.is_grad_enabled()
        kept = with_backward or not unit.kept_by_default
        # Where a backward may come that no output announces, nothing would gather for it.
        hidden = with_backward and not has_outputs and not transforms_are_active() and unit.trains
        if unit.running == 0 and not hidden and (unit.switches.reshard_after_forward or not kept):
            unit.reshard(for_backward=with_backward and unit.switches.gather_in_backward)
        # A frozen unit that begins the model gets no backward.
        if with_backward and (transforms_are_active() or has_outputs):
            self.context.leave(unit)

    def _complete_groups(self, output: object) -> object:
        """End the forwards of groups of which some modules did not run."""
        for state in reversed(self.context.states):
            if state is not self and state._missing and state.moment is Moment.FORWARD:
                state._missing.clear()
                output = state._end_forward(output)
        return output

    def _cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        dtype = self.mixed.param_dtype
        if dtype is None or not self.mixed.cast_forward_inputs:
            return args, kwargs
        return map_tensors(_caster(dtype), (args, kwargs))

    def _cast_output(self, output: object) -> object:
        dtype = self.mixed.output_dtype
        return output if dtype is None else map_tensors(_caster(dtype), output)

    # --- backward

    def _mark_start(self, output: object, found: Sequence[torch.Tensor]) -> object:
        """Let the backward say when it begins with this forward.

        Args:
            found: the tensors of the output that require a gradient.
        """
        if not torch.is_grad_enabled():
            return output
        for tensor in found:
            tensor.register_hook(self.before_backward)
            # An operation in place on a view replaces its node, and leaves the base's where it is.
            base = tensor._base
            if base is not None and base.grad_fn is not None and self._made_here(base):
                base.register_hook(self.before_backward)
        if transforms_are_active():  # tensors in there may require gradients outside alone
            start = cast("Callable[..., torch.Tensor]", _UnitStart.apply)

            def started(tensor: torch.Tensor) -> torch.Tensor:
                passes = tensor.requires_grad or not tensor.is_floating_point()
                return tensor if passes else start(self, tensor)

            return map_tensors(started, output)
        return output

    def _made_here(self, tensor: torch.Tensor) -> bool:
        """Return whether the forward that ends has computed it."""
        return creation_number(tensor.grad_fn) >= self._first_node

    def announce_backward(self) -> None:
        """Begin a backward, at a module, or at a parameter where outputs did not lead to it."""
        ending = self.context.ending
        if ending and ending() is None and not self.context.faulty:
            self._forget_failed()
        if not self.context.ending:
            self.context.begin_backward()
            call = self.end_of_backward
            self.context.ending = weakref.ref(call)
            at_end_of_backward(call)

    @untraced
    def before_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gather for a backward that has reached the outputs."""
        self.announce_backward()
        self.moment = Moment.BEFORE_BACKWARD
        for unit in reversed(self.uses):
            unit.busy.add(id(self))
            if unit.moment is Moment.BEFORE_BACKWARD and unit.is_unsharded:
                continue
            unit.moment, unit.touched = Moment.BEFORE_BACKWARD, True
            needed = [unit] if unit.switches.gather_in_backward else []
            if self.backward_next:
                self.context.gather(needed)
            else:
                self.context.gather(needed, partial(self.context.prefetch_before, unit))
        for state in self.backward_next:
            if state.unit is not None:
                self.context.prefetch(state.unit)
        return gradient

    @untraced
    def reached_end(self, counted: bool) -> None:
        """Note that a backward is through with a forward, which was counted among those expected or
        not.
        """
        self.announce_backward()
        if self.moment is Moment.FORWARD:  # whose graph the script differentiates meanwhile
            return
        self.moment = Moment.IDLE
        for unit in self.uses:
            unit.expected -= counted
            unit.busy.discard(id(self))
            if unit.expected <= 0 and not unit.busy:
                self.after_backward(unit)
            else:
                unit.moment = Moment.IDLE  # that of another forward begins

    def after_backward(self, unit: Unit) -> None:
        """Take away the parameters and send the gradients. Collective."""
        unit.expected, unit.moment, unit.touched = 0, Moment.AFTER_BACKWARD, False
        if unit.switches.reshard_after_backward and not self.context.creates_graph:
            unit.reshard()
        if unit.switches.reduce:
            self.context.reduce(unit)
        else:
            unit.keep_gradients()

    @untraced
    def end_of_backward(self) -> None:
        """Send what has not been sent, and wait for everything."""
        self.context.connections.log.end_backward()
        in_forward = any(unit.running for unit in self.context.units())
        for state in self.context.states:
            if state.moment is not Moment.FORWARD or state._again:
                state._missing.clear()
                state.moment = Moment.IDLE
        for state in self.context.states:
            unit = state.unit
            if unit is None:
                continue
            if unit.running:  # the script called for this backward inside a forward
                if unit.switches.reduce and unit.has_gradients():
                    self.context.reduce(unit)
                continue
            left = unit.moment is not Moment.AFTER_BACKWARD and (unit.expected or unit.touched)
            if left or (unit.switches.reduce and unit.has_gradients()):
                state.after_backward(unit)
            elif unit.switches.reshard_after_backward and not self.context.creates_graph:
                unit.reshard()  # what a forward has kept that this backward does not reach
            unit.end_backward()
        if in_forward:
            self.context.end_backward_in_forward()
        else:
            self.context.end_backward()

    def reset(self) -> None:
        """Forget a step that failed.

        Raises:
            RuntimeError: this is not the root.
        """
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        self._forget()

    def _forget_failed(self) -> None:
        """Forget a backward that failed, of which the script has not told.

        Raises:
            RuntimeError: gradients of earlier backwards are lost with it.
        """
        lost = any(unit.accumulates for unit in self.context.units())
        self._forget()
        if lost:
            raise RuntimeError(_LOST.format(dist.get_rank()))

    def _forget(self) -> None:
        for state in self.context.states:
            state.moment = Moment.IDLE
            state._missing.clear()
        self.context.forget()


_LOST = (
    "the last backward failed on rank {}, and with it what backwards without reduction "
    "(set_requires_gradient_sync(False)) had accumulated is lost. Run these micro-batches again; "
    "reset_iter_state() of the root, called after the exception, says that you will"
)


def kind_of(module: nn.Module) -> str:
    """Return the name of its class before fully_shard()."""
    return type(module).__name__.removeprefix("FSDP")


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t
