"""Methods of a module after fully_shard(): those of FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import UnshardHandle

from fastsync.fsdp.dtype_shard import release_gradients
from fastsync.fsdp.errors import RefusedError
from fastsync.fsdp.module_hooks import State, state_of
from fastsync.fsdp.param_group import Unit
from fastsync.fsdp.step_records import Recording
from fastsync.fsdp.weights import Weighted

__all__ = ["FSDPModule", "register_fsdp_forward_method", "shard_class"]

M = TypeVar("M", bound=nn.Module)


class _Handle(UnshardHandle):
    """Waits for a unit that is being gathered."""

    def __init__(self, state: State) -> None:
        self._state: State | None = state

    def wait(self) -> None:
        """Wait until the module has its whole parameters."""
        state, self._state = self._state, None
        if state is not None and state.unit is not None:
            state.context.gather([state.unit])
            release_gradients(state.unit.dtype_shards)


def _state(module: object) -> State:
    found = state_of(cast(nn.Module, module))
    if found is None:
        raise RuntimeError(f"fully_shard() was not applied to this {type(module).__name__}")
    return found


def _states(modules: object) -> list[State]:
    """
    Raises:
        ValueError: fully_shard() was not applied to one of them.
    """
    for module in cast(Iterable[object], modules):
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [_state(module) for module in cast(Iterable[object], modules)]


def _units(module: object, recurse: bool) -> Iterator[Unit]:
    root = cast(nn.Module, module)
    for each in root.modules() if recurse else [root]:
        state = state_of(each)
        if state is not None and state.unit is not None:
            yield state.unit


class _Gathering:
    """When whole parameters come and go."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit, not those below.

        Args:
            async_op: returns at once, with a handle to wait on; the module's forward waits too.
        """
        state = _state(self)
        if state.unit is not None:
            state.connect()
            state.unit.refresh()
            state.unit.start_gather()
        handle = _Handle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Take away the whole parameters of this module's own unit."""
        unit = _state(self).unit
        if unit is not None:
            unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward ends with a reshard; if not, backward needs no second gather."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        root = cast(nn.Module, self)
        for module in root.modules() if recurse else [root]:
            state = state_of(module)
            if state is not None:
                state.auto_reshard = False
        for unit in _units(self, recurse):
            unit.switches.reshard_after_forward = reshard_after_forward
            unit.switches.reshard_to = None
            unit.kept_by_default = False

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward ends with a reshard; if not, the next forward needs no gather."""
        for unit in _units(self, recurse):
            unit.switches.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchModule]) -> None:
        """Units that are gathered while this one's forward runs, instead of the next one."""
        _state(self).forward_next = _states(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchModule]) -> None:
        """Set the modules that are gathered ahead while this one's backward runs."""
        _state(self).backward_next = _states(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this unit's parameters: that of an embedding does not."""
        for unit in _units(self, recurse=False):
            unit.switches.gather_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Do nothing: gathers wait for the current stream in any case."""

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that failed; for the root alone.

        Gradients that had been reduced by then stay: call zero_grad(). Those that backwards
        without reduction have accumulated are lost: run these micro-batches again. Without this
        call the next forward, or backward, raises an error if there are any.
        """
        _state(self).reset()


class _Reducing:
    """When and how gradients travel."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients; if not, each rank accumulates whole ones."""
        for unit in _units(self, recurse):
            unit.switches.reduce = unit.switches.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether replicas (2D meshes) add up the sums; if not, these accumulate on each."""
        for unit in _units(self, recurse):
            unit.switches.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether what was observed in forward is needed no more after the next backward."""
        _state(self).context.tell_last_backward(is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of sums of gradients, instead of the number of ranks."""
        for unit in _units(self, recurse=False):
            unit.switches.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divisor, by the former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` with this rank's sums, one-dimensional, before they become gradients.

        Args:
            stream: that is current meanwhile; the current one by default.

        Raises:
            ValueError: there is a `stream`, and ranks repeat each other (HSDP).
        """
        for unit in _units(self, recurse=False):
            if stream is not None and unit.place.replicas is not None:
                raise ValueError("stream cannot be set when using native HSDP")
            unit.switches.hook, unit.switches.hook_stream = hook, stream

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Parameters that only some ranks used are averaged in any case, over all ranks."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Collectives sum in any case."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Units whose gradients may travel at once; the memory is theirs meanwhile."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        _state(self).context.most_in_flight = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Not supported: gathers and reductions share a process group."""
        if enable:
            raise _unsupported("set_separate_reduce_scatter_group()")

    def set_custom_all_gather(self, comm: object) -> None:
        """Not supported."""
        raise _unsupported("set_custom_all_gather()")

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Not supported."""
        raise _unsupported("set_custom_reduce_scatter()")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not supported."""
        raise _unsupported("set_symm_mem_for_comm()")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept a hint on where NCCL's buffers lie, which no result depends on."""


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"fastsync.fully_shard does not support {what}: its own kernels and transports move units"
    )


class FSDPModule(_Gathering, _Reducing, Recording, Weighted, TorchModule):
    """A module that `fastsync.fully_shard` was applied to; torch's FSDPModule, too."""

    def __new__(cls, *args: object, **kwargs: object) -> FSDPModule:
        """Make plain modules, as a Sequential does when it is sliced."""
        plain = cast("type[FSDPModule]", cls.__mro__[cls.__mro__.index(TorchModule) + 1])
        made = plain.__new__(plain)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    def _get_fsdp_state(self) -> NoReturn:
        raise _unsupported("torch's internal _get_fsdp_state()")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers are asynchronous in any case."""

    def _apply(self, *args: object, **kwargs: object) -> object:
        """Conversions apply to the shares."""
        unit = _state(self).unit
        if unit is not None:
            unit.reshard()
        made = super(TorchModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        if unit is not None:
            unit.sync_params()
        return made

    def __deepcopy__(self, memo: object) -> NoReturn:
        made_by = _state(self).made_by
        subject = "FSDP" if made_by == "fully_shard()" else made_by
        raise RefusedError(
            f"{subject} does not support deepcopy: copy the module before {made_by}, or load its "
            "state dict into another one"
        )


@functools.cache
def shard_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return `kind` with FSDPModule's methods."""
    methods = {name: _explained(method) for name, method in _other_methods(kind)}
    space = {**methods, "__module__": kind.__module__}
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), space)


def _other_methods(kind: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield what scripts may call besides forward(): public methods of their own classes."""
    for each in reversed(kind.__mro__):
        if issubclass(each, nn.Module) and not each.__module__.startswith("torch."):
            for name, found in vars(each).items():
                known = name == "forward" or name.startswith("_") or hasattr(nn.Module, name)
                if isinstance(found, FunctionType) and not known:
                    yield name, found


def _explained(method: FunctionType) -> Callable[..., object]:
    """Return the method, with a remedy in what it raises where it computes with shares."""

    @functools.wraps(method)
    def explained(*args: object, **kwargs: object) -> object:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise RuntimeError(
                f"{method.__qualname__}() computes with parameters that are sharded, as "
                "fully_shard() and zero=3 gather them for forward() alone: call "
                f"fastsync.register_fsdp_forward_method(module, {method.__name__!r}) on every "
                "rank, where module is what fully_shard() was applied to (FastDDP's .module)"
            ) from error

    return explained


# What torch says where a DTensor meets a tensor.
_MIXED = "got mixed torch.Tensor and DTensor"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of `module` gather and reshard as forward() does.

    It has no effect where fully_shard() was not applied to `module`.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        state = _state(module)
        inputs, named = state.before_forward(module, args, kwargs)
        return state.after_forward(module, inputs, original(*inputs, **named))

    setattr(module, method_name, wrapped)
