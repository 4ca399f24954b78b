"""Methods of a module after fully_shard(): those of FSDP2."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import UnshardHandle

from fastsync._build.env import Env
from fastsync.fsdp.context import Context
from fastsync.fsdp.dtype_shard import release_gradients
from fastsync.fsdp.mesh import Place, RefusedError
from fastsync.fsdp.module_hooks import State, kind_of, state_of
from fastsync.fsdp.param_group import Unit
from fastsync.reducer.mean_weights import MeanWeights, Number
from fastsync.reducer.weak_calls import weakly
from fastsync.timeline.recorder import RecordedModel, Recorder, TimelinePolicy
from fastsync.timeline.stats import SyncStats, unit_stats

Wanted = str | os.PathLike[str] | bool | TimelinePolicy


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


def record(
    root: nn.Module, policy: TimelinePolicy, group: dist.ProcessGroup | None = None
) -> Recorder:
    """Record the steps of `root` from now on.

    Args:
        group: the ranks that are recorded together; by default those of its mesh.

    Raises:
        RuntimeError: it is no root, has no parameters, or is recorded already.
    """
    context = context_of(root)
    if context.recorder is not None:
        raise RuntimeError(
            "this model is recorded already; write_timeline() writes what there is at any time"
        )
    places = _places_below(root)
    if not places:
        raise RuntimeError("there is nothing to record: fully_shard() found no parameters")
    names = tuple(name for name, _ in root.named_parameters())
    model = RecordedModel(kind_of(root), names, places[0].device, units=context.connections.infos)
    context.recorder = Recorder(policy, model, group or places[0].everybody())
    return context.recorder


def stats_of(root: nn.Module, one_rank_step: float | None) -> SyncStats:
    """Return what synchronising has cost this rank."""
    context = context_of(root)
    steps = context.recorder.steps() if context.recorder is not None else []
    counted, infos = context.counters(), context.connections.infos
    return unit_stats(counted, context.connections.log.steps(), infos, steps, one_rank_step)


def context_of(module: nn.Module) -> Context[State]:
    """Return the context that the units of a root share.

    Raises:
        RuntimeError: it is no root.
    """
    state = _state(module)
    if state.is_root is False:
        raise RuntimeError(
            f"this {kind_of(module)} is no root: ask the outermost module of fully_shard(), which "
            "knows of all units"
        )
    return state.context


def _places_below(root: nn.Module) -> list[Place]:
    states = (state_of(module) for module in root.modules())
    return [unit.place for state in states if state is not None for unit in state.uses]


def weights_of(root: nn.Module) -> MeanWeights:
    """Return what weights of a root are given to.

    Raises:
        RuntimeError: it is no root, or has no parameters.
        ValueError: its ranks have no process group in common.
    """
    context = context_of(root)
    if context.weights is None:
        places = _places_below(root)
        if not places:
            raise RuntimeError("there is nothing to average: fully_shard() found no parameters")
        group = places[0].everybody()
        if group.size() != places[0].ranks:
            raise RefusedError(
                "add_weight() needs a process group of all ranks: a mesh of one dimension, or one "
                "of two that has all ranks of the default group"
            )
        name = zlib.crc32(",".join(name for name, _ in root.named_parameters()).encode())
        averages = weakly(context.averages)
        context.weights = MeanWeights(group, str(name), places[0].device, averages, lambda index: 0)
    return context.weights


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"fastsync.fully_shard does not support {what}: its own kernels and transports move units"
    )


class FSDPModule(TorchModule):
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

    # --- when unsharded parameters come and go

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

    # --- when and how gradients travel

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

    # --- weights of micro-batches, and records of steps

    def add_weight(self, weight: Number, mean: torch.Tensor | None = None) -> torch.Tensor | None:
        """Give the next micro-batch a weight; see `FastDDP.add_weight`.

        Raises:
            RuntimeError: the module is no root.
            ValueError: it makes no sense, or the ranks have no process group in common.
        """
        weights_of(cast(nn.Module, self)).add(weight)
        return None if mean is None else mean * weight

    def sync_stats(self, one_rank_step: float | None = None) -> SyncStats:
        """Counters of gathers and reductions, and times where `record_timeline()` records.

        Args:
            one_rank_step: seconds of a training step without other ranks, on as much data as each
                rank has here; gives the scaling efficiency.

        Raises:
            RuntimeError: the module is no root.
            ValueError: `one_rank_step` is not positive, or no two steps have been recorded.
        """
        return stats_of(cast(nn.Module, self), one_rank_step)

    def record_timeline(self, timeline: Wanted = True) -> None:
        """Record when units are gathered and reduced; every rank calls it, on the root.

        Args:
            timeline: as FastDDP's argument: a path that is written after 20 steps, True to record
                until training ends, or a `TimelinePolicy`. The same on every rank.

        Raises:
            RuntimeError: the module is no root, or is recorded already.
        """
        policy = TimelinePolicy.of(timeline)
        if policy is not None:
            record(cast(nn.Module, self), policy)

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what has been recorded so far; every rank calls it.

        Args:
            path: rank 0 writes this file.

        Raises:
            RuntimeError: nothing is recorded.
        """
        recorder = context_of(cast(nn.Module, self)).recorder
        if recorder is None:
            raise RuntimeError(
                "write_timeline() finds no recording; call record_timeline() on the root, on every "
                "rank"
            )
        recorder.write(os.fspath(path), Env.read().agree_timeout)


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
