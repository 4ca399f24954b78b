"""fully_shard: makes modules share their parameters over ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from fastsync._torch import (
    act_as_unsharded,
    is_registered,
    is_replicated,
    local_of,
    make_dtensor,
    make_spec,
    register_sharded,
    shard_spec,
    share_hooks,
    spec_of,
    with_own_storage,
)
from fastsync.config.policy import UnitWires
from fastsync.fsdp.dtype_shard import TRAINABLE, MixedDTypes
from fastsync.fsdp.extension_param import own_share, stands_apart
from fastsync.fsdp.fsdp_module import shard_class
from fastsync.fsdp.mesh import Place, RefusedError, default_mesh, ranks_of
from fastsync.fsdp.module_hooks import State, state_of
from fastsync.fsdp.param_group import Unit
from fastsync.fsdp.shard_layout import Shape
from fastsync.fsdp.sharded_param import OWNER, Home, ShardedParam, find_homes
from fastsync.reducer.monitor import expect_watch
from fastsync.reducer.registrations import registrations
from fastsync.reducer.tied_parameters import Memories, check_untied
from fastsync.wire.formats import Choice, Wire, make_codec
from fastsync.wire.plugins import check_device

T = TypeVar("T", bound=nn.Module | Sequence[nn.Module])
PlacementFn = Callable[[nn.Parameter], Shard | None]
# Of parameters that have been sharded, where another tensor keeps it.
_memories = Memories()


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: AbstractSet[nn.Parameter] | None = None,
    wire: Wire | Choice = "fp32",
    parameter_wire: str | None = None,
) -> T:
    """Shard the parameters, gradients and optimizer state of `module` over the ranks.

    The contract is that of torch.distributed.fsdp.fully_shard (FSDP2; ZeRO stage 3): parameters
    become DTensors with their global sizes. Before the module's forward, and again before its
    backward, the ranks gather its parameters in one collective; after its backward they reduce its
    gradients in one. Apply it to the submodules first, then to the root.

    Args:
        module: the module, or several whose parameters travel together.
        mesh: of one dimension: the ranks that share. Of two: ranks share along the second, and
            repeat each other along the first (HSDP). All ranks by default.
        reshard_after_forward: whether whole parameters are freed between forward and backward.
            By default they are, but for the root, whose backward comes next. A number: so many
            ranks, which follow each other, keep a part each, and backward gathers from these.
        shard_placement_fn: the dimension, as `Shard(dim)`, along which a parameter is cut; None:
            the first. Another dimension than the first must be divisible by the number of ranks.
        mp_policy: dtypes to compute in, to reduce gradients in, and of outputs.
        offload_policy: CPUOffloadPolicy has the shares, their gradients and so optimizers' states
            stay on the CPU, where modules compute on another device.
        ignored_params: stay as they are; their gradients are not averaged.
        wire: what gradients travel as: a format such as "int8", a codec, or a `fastsync.Wire` of
            one. Each is rounded once; sums are fp32. There is no error feedback.
        parameter_wire: the format that parameters travel as, such as "int8". Modules compute with
            what it rounds them to; the shares, which optimizers update, stay exact.

    Returns:
        `module`, whose class has `FSDPModule`'s methods now.

    Raises:
        ValueError: an argument makes no sense, or a parameter has no dimension.
        NotImplementedError: what FSDP2 knows and this does not.
    """
    wires = UnitWires(Wire.of(wire), parameter_wire)
    modules = _roots(module)
    place = Place.of(default_mesh() if mesh is None else mesh, offload_policy)
    expect_watch(place.group)
    mixed = mp_policy or MixedPrecisionPolicy()
    reshard = _check_reshard(reshard_after_forward, place)
    for each in modules:
        _check_module(each)
    params, buffers = _managed(modules, ignored_params or set())
    _check_untied(type(modules[0]).__name__, params)
    cuts = [_cut(name, param, shard_placement_fn, place) for name, param in params.items()]
    _move([*buffers, *(params.values() if place.offload is None else ())], place.device)
    for name in params:
        check_device(make_codec(wires.gradients.format), name, place.device)
    own, tied = _split_tied(modules, params)
    by_param = dict(zip(map(id, params.values()), cuts, strict=True))
    sharded_params = _shard_params(modules, own, [by_param[id(param)] for param in own], place)
    unit = None
    if sharded_params:
        dtypes = MixedDTypes(mixed.param_dtype, mixed.reduce_dtype, mixed)
        unit = Unit.of(modules, sharded_params, place, dtypes, wires)
        unit.switches.reshard_after_forward = reshard is not False
        unit.switches.reshard_to = None if isinstance(reshard, bool) else reshard
        for param, sharded_param in zip(own, sharded_params, strict=True):
            setattr(param, OWNER, (weakref.ref(unit), sharded_param))
    registrations()  # are counted from now on
    act_as_unsharded()
    state = State(modules, unit, mixed, reshard_after_forward is None, tied)  # the modules hold it
    state.ignored = tuple(ignored_params or ())
    for each in modules:
        register_sharded(each)
        each.__class__ = shard_class(cast("Hashable", type(each)))
    return module


def _check_untied(kind: str, params: dict[str, nn.Parameter]) -> None:
    """Refuse parameters of a module of class `kind` that share memory with others."""
    fresh = ((n, _local(p)) for n, p in params.items() if getattr(p, OWNER, None) is None)
    named = ((f"{name} of {kind}", local) for name, local in fresh)
    check_untied(named, "or put both into ignored_params", _memories)


def _roots(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of a list that are in no other one."""
    if isinstance(module, nn.Module):
        return [module]
    below = {id(sub) for each in module for sub in each.modules() if sub is not each}
    found = list({id(each): each for each in module if id(each) not in below}.values())
    if not found:
        raise ValueError("fully_shard expects a module or a list of modules but got an empty list")
    return found


def _check_module(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"fully_shard and zero=3 cannot shard a {type(module).__name__}, whose compiled code "
            "computes with the parameters that it has: shard the module that it was made of and "
            "compile that with torch.compile, or use zero=2"
        )
    if type(module).forward is nn.Module.forward and isinstance(
        module, nn.ModuleList | nn.ModuleDict
    ):
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    if state_of(module) is not None:
        raise RefusedError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"fully_shard has already been applied to this {type(module).__name__}"
        )


def _check_reshard(given: bool | int | None, place: Place) -> bool | int:
    """Return whether forward ends with a reshard; a number: to fewer ranks than share."""
    if given is None or isinstance(given, bool):
        return given is not False
    if not isinstance(given, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {given}"
        )
    if given < 1 or given > place.world or place.world % given:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{place.world}, not {given}"
        )
    if given == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead "
            "of reshard_after_forward=True (bool)",
            stacklevel=3,
        )
    if given in (1, place.world):
        return given == place.world
    if not is_registered(place.group):
        raise RefusedError(
            f"reshard_after_forward={given} needs a process group that torch.distributed has made; "
            "use True or False with this mesh"
        )
    return given


def _walk(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules whose parameters belong to these, the lowest first."""
    seen: set[int] = set()

    def visit(module: nn.Module, top: bool) -> Iterator[nn.Module]:
        taken = is_replicated(module) or (not top and state_of(module) is not None)
        if id(module) in seen or taken:
            return
        seen.add(id(module))
        for child in module.children():
            yield from visit(child, False)
        yield module

    for module in modules:
        yield from visit(module, True)


def _managed(
    modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter]
) -> tuple[dict[str, nn.Parameter], list[torch.Tensor]]:
    """Parameters by a name that tells them apart, and buffers."""
    passed = {id(param) for param in ignored}
    params: dict[str, nn.Parameter] = {}
    buffers: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    names = {id(p): n for m in modules for n, p in m.named_parameters()}
    for module in _walk(modules):
        for name, param in module.named_parameters(recurse=False):
            if id(param) in passed or id(param) in seen:
                continue
            seen.add(id(param))
            full = names.get(id(param), name)
            params[full if full not in params else f"{full} ({len(params)})"] = param
        buffers.update((id(b), b) for b in module.buffers(recurse=False))
    return params, list(buffers.values())


def _cut(
    name: str, param: nn.Parameter, placement_fn: PlacementFn | None, place: Place
) -> Shape | None:
    """Return how a parameter is cut; None: it has been, by another unit.

    Raises:
        ValueError, NotImplementedError: it cannot be.
    """
    if getattr(param, OWNER, None) is not None:
        return None
    if param.ndim == 0:
        raise ValueError(
            "fully_shard doesn't support scalar parameters. "
            f"Change {name} to a 1D tensor with numel equal to 1."
        )
    if isinstance(param, DTensor):
        _check_dtensor(name, param, place)
    if param.requires_grad and param.dtype not in TRAINABLE:
        raise NotImplementedError(
            f"parameter {name!r} is {param.dtype} and requires a gradient: fastsync.fully_shard "
            "trains float32, float64, float16 and bfloat16; put it into ignored_params"
        )
    if not _local(param).is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {name!r} has "
            f"{param.shape=} {param.stride()=}"
        )
    return _checked_shape(name, param, placement_fn(param) if placement_fn else None, place)


def _check_dtensor(name: str, param: DTensor, place: Place) -> None:
    kind = param.device_mesh.device_type
    if kind != place.device.type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{kind} for DTensor and {place.device.type} for FSDP: parameter {name!r}"
        )
    if len(set(ranks_of(param.device_mesh)) & set(ranks_of(place.mesh))) > 1:
        raise NotImplementedError(
            f"parameter {name!r} is a DTensor already over ranks that are to share it; "
            "fastsync.fully_shard takes DTensors of tensor parallelism, whose mesh crosses its own"
        )


def _checked_shape(name: str, param: nn.Parameter, chosen: object, place: Place) -> Shape:
    sizes = tuple(_local(param).shape)
    if chosen is None:
        return Shape(sizes)
    if not isinstance(chosen, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {chosen}")
    dim = chosen.dim + param.ndim if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < param.ndim:
        raise RefusedError(
            f"Shard dim {chosen.dim} is invalid for {param.ndim}D tensor {name!r} of sizes "
            f"{tuple(param.shape)}"
        )
    if dim > 0 and sizes[dim] % place.world:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {name!r} has {sizes} "
            f"(world size: {place.world})"
        )
    return Shape(sizes, dim)


def _local(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter: all, unless it is a DTensor by itself."""
    return local_of(param) if isinstance(param, DTensor) else param.detach()


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if not (tensor.is_meta or tensor.device == device or isinstance(tensor, DTensor)):
            tensor.data = tensor.to(device)


def _split_tied(
    modules: Sequence[nn.Module], params: dict[str, nn.Parameter]
) -> tuple[list[nn.Parameter], list[Unit]]:
    """Return parameters that no unit has, and the units that have the others,
    which get homes here.
    """
    own: list[nn.Parameter] = []
    tied: dict[int, Unit] = {}
    for name, param in params.items():
        owner = cast("tuple[weakref.ref[Unit], ShardedParam] | None", getattr(param, OWNER, None))
        if owner is None:
            own.append(param)
            continue
        unit, sharded_param = owner[0](), owner[1]
        if unit is None:
            raise ValueError(f"parameter {name!r} is tied to one of a module that is gone")
        sharded_param.homes.extend(find_homes(modules, [param])[0])
        unit.show_sharded()
        tied[id(unit)] = unit
    return own, list(tied.values())


@torch.no_grad()
def _shard_params(
    modules: Sequence[nn.Module],
    params: Sequence[nn.Parameter],
    shapes: Sequence[Shape | None],
    place: Place,
) -> list[ShardedParam]:
    homes = find_homes(modules, params)
    return [
        _shard_param(param, shape, its, place)
        for param, shape, its in zip(params, shapes, homes, strict=True)
        if shape is not None
    ]


def _share(local: torch.Tensor, shape: Shape, place: Place) -> torch.Tensor:
    if stands_apart(local):
        return own_share(local, shape, place)
    each = shape.count(0, place.world)
    begin = min(each * place.rank, shape.sizes[shape.dim])
    return with_own_storage(local.narrow(shape.dim, begin, shape.count(place.rank, place.world)))


def _shard_param(
    param: nn.Parameter, shape: Shape, homes: list[Home], place: Place
) -> ShardedParam:
    share = _share(_local(param), shape, place)
    if place.offload is not None and not share.is_meta:
        share = share.to(place.home)
    inner = spec_of(param) if isinstance(param, DTensor) else None
    placements = place.placements(shape.dim)
    if inner is None:
        spec = make_spec(place.mesh, placements, shape.sizes, param.dtype)
    else:
        spec = shard_spec(place.mesh, placements, inner)
    sharded = nn.Parameter(make_dtensor(share, spec), requires_grad=param.requires_grad)
    share_hooks(param, sharded)
    return ShardedParam(homes, shape, place, sharded, inner=inner)
