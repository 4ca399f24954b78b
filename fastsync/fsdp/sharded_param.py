"""One parameter of a unit: this rank's share, and the whole that modules compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fastsync._torch import (
    DTensorSpec,
    accumulate_hooks,
    data_of,
    local_gradient,
    local_of,
    make_dtensor,
    set_data,
    spec_of,
    storage_address,
    tensor_hooks,
    with_dtype,
    with_own_storage,
)
from fastsync.faults.consensus import Param
from fastsync.fsdp.mesh import Place
from fastsync.fsdp.shard_layout import Shape
from fastsync.reducer import core
from fastsync.reducer.registrations import unnoticed

# Attribute of a parameter that shards have replaced: its unit and `ShardedParam`, for modules
# outside that are tied to it and for optimizers that still hold it.
OWNER = "_fastsync_owner"


@dataclass(frozen=True)
class Home:
    """Attribute of a module that is a parameter."""

    module: nn.Module
    name: str

    def put(self, param: nn.Parameter) -> None:
        """Register `param` there."""
        # nn.Module's own way checks what is known here; modules with another one need to see it.
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = param
        else:
            with unnoticed():
                setattr(self.module, self.name, param)

    def get(self) -> nn.Parameter:
        """Return the parameter that is registered there."""
        found = self.module._parameters[self.name]
        assert found is not None
        return found


class _Unsharded(nn.Parameter):
    """Unsharded parameter that notes when a script takes `.data`: no version counts its writes."""

    is_noting = False
    taken: torch.Tensor | None = None  # a copy from then

    @property
    def data(self) -> torch.Tensor:
        if self.is_noting and self.taken is None:
            self.taken = self.detach().clone()
        return data_of(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        set_data(self, values)

    def note(self) -> None:
        """Begin to note."""
        self.is_noting, self.taken = True, None

    def is_written(self) -> bool:
        """Return whether values have changed since `.data` was taken, and note no more."""
        taken, self.taken, self.is_noting = self.taken, None, False
        if taken is None:
            return False
        before, now = (each.reshape(-1).view(torch.uint8) for each in (taken, self.detach()))
        return not torch.equal(before, now)


class _Lent(NamedTuple):
    """Gradient of a share that scripts see at the unsharded parameter.

    Attributes:
        gradient: that of the share.
        seen: the same, or a copy; `version`: its version when it was lent.
    """

    gradient: torch.Tensor
    seen: torch.Tensor
    version: int


@dataclass
class ShardedParam:
    """Parameter that ranks share.

    Attributes:
        homes: every place where modules have it; several where it is tied.
        shape: of the whole, and how it is cut; of this rank's local tensor where the parameter is
            a DTensor by itself (tensor parallelism).
        sharded: what optimizers see: a DTensor of which this rank has a share.
        unsharded: what modules compute with; its memory comes and goes. None before the first time.
        partial: a gradient that has been accumulated without communication in the dtype in which
            gradients are reduced, where that is not the one in which they arrive.
        trained: whether it wanted a gradient when last looked at.
        watched: what has the gradients of `whole` noticed; None: nothing.
        name: in the root module, once that is known.
        inner: of the whole, where that is a DTensor.
        spec: of the shares and their gradients.
    """

    homes: list[Home]
    shape: Shape
    place: Place
    sharded: nn.Parameter
    unsharded: nn.Parameter | None = None
    partial: torch.Tensor | None = None
    name: str = ""
    inner: DTensorSpec | None = None
    spec: DTensorSpec = field(init=False)
    trained: bool = field(init=False)
    watched: core.WatchedGradient | None = None
    _relay: RemovableHandle | None = None
    _lent: _Lent | None = None
    _version: int | None = None  # of the share, when it was gathered
    _gathered: tuple[int, int] | None = None  # version and storage of the whole, from then on
    _wrapper: torch.UntypedStorage = field(init=False)
    _local: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.trained = self.sharded.requires_grad
        self._note()
        self.name = self.name or self.homes[0].name
        self.spec = spec_of(self.sharded)

    def described(self) -> Param:
        """Return what it must have in common with the other ranks' parameter."""
        dtype = str(self.sharded.dtype).removeprefix("torch.")
        return self.name, self.shape.sizes, dtype, self.sharded.requires_grad

    def set_spec(self, dtype: torch.dtype) -> None:
        """Set the dtype of parameters and gradients."""
        self.spec = with_dtype(self.spec, dtype)

    def make_unsharded(self, memory: torch.Tensor) -> None:
        """Make a parameter of what is in `memory`, to compute with."""
        if self.inner is not None:
            memory = make_dtensor(memory, with_dtype(self.inner, memory.dtype))
        # A DTensor stays one, whatever class of parameters is made of it.
        self.unsharded = _Unsharded(memory, requires_grad=self.sharded.requires_grad)
        self.watched = self._relay = None

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's share."""
        return local_of(self.sharded)

    def local_sizes(self) -> tuple[int, ...]:
        return self.shape.local(self.place.rank, self.place.world)

    def share_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of `whole`, of the whole parameter's sizes, that this rank keeps."""
        dim, world, rank = self.shape.dim, self.place.world, self.place.rank
        begin = min(self.shape.count(0, world) * rank, self.shape.sizes[dim])
        return whole.narrow(dim, begin, self.shape.count(rank, world))

    def is_of_unsharded_size(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a plain one of the whole parameter's sizes."""
        return (
            type(tensor) in (torch.Tensor, nn.Parameter, _Unsharded)
            and self.inner is None
            and tuple(tensor.shape) == self.shape.sizes
        )

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor, placed as the parameter, of which this rank has `local`."""
        return make_dtensor(with_own_storage(local), with_dtype(self.spec, local.dtype))

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's share of the gradient."""
        grad = self.sharded.grad
        return None if grad is None else local_of(grad)

    def set_gradient(self, local: torch.Tensor) -> None:
        self.sharded.grad = make_dtensor(local, self.spec)

    def unsharded_local(self) -> torch.Tensor:
        """Return this rank's tensor of the whole, where that is a DTensor; otherwise the whole."""
        assert self.unsharded is not None
        return self.unsharded if self.inner is None else local_of(self.unsharded)

    def _note(self) -> None:
        self._wrapper, self._local = self.sharded.untyped_storage(), self.local

    def note_local(self) -> None:
        """Note the local tensor: it is where it should be."""
        self.check_data()
        self._note()

    def note_version(self) -> None:
        """Note that the share is gathered as it is now, unless that has begun before."""
        if self._version is None:
            self._version = self.sharded._version

    def forget_version(self) -> None:
        """Note that nothing is gathered."""
        self._version = None

    def note_whole(self) -> None:
        """Note that the whole has the values of the shares."""
        self._gathered = self._seen()
        if isinstance(self.unsharded, _Unsharded):
            self.unsharded.note()

    def check_whole(self) -> None:
        """
        Raises:
            RuntimeError: a script has written to the whole, or assigned to its `.data`. What is
                written to `.data` of a DTensor is not seen.
        """
        gathered, self._gathered = self._gathered, None
        written = isinstance(self.unsharded, _Unsharded) and self.unsharded.is_written()
        if written or (gathered is not None and gathered != self._seen()):
            raise RuntimeError(
                f"parameter {self.name!r} was written to while it was gathered, as by momentum "
                "updates in forward() or an embedding with max_norm, which would be lost: the "
                "shards keep their values. Write to parameters between forward and backward, or "
                "after the step; or use zero=2"
            )

    def _seen(self) -> tuple[int, int]:
        assert self.unsharded is not None
        version = -1 if self.unsharded.is_inference() else self.unsharded._version
        return version, storage_address(self.unsharded)

    def is_gathered(self) -> bool:
        """Return whether `whole` has the values of the shares, or is about to."""
        return self._version is not None

    def is_changed(self) -> bool:
        """Return whether a script has written to the share since it was gathered.

        It is seen alike on every rank, as it is the version of the DTensor. What is written to
        `.data` has versions of its own.
        """
        return self._version is not None and self.sharded._version != self._version

    def is_exchanged(self) -> bool:
        """Return whether a script has registered another parameter, or given this one other data.

        Raises:
            RuntimeError: it has assigned to `.data`, or taken the parameter out of its module.
        """
        self.check_data()
        exchanged = self.local is not self._local
        for home in self.homes:
            found = home.module._parameters.get(home.name)
            if found is self.sharded or found is self.unsharded:
                continue
            if found is None or home is not self.homes[0]:
                done = "removed" if found is None else "exchanged where it is tied to another"
                raise RuntimeError(
                    f"parameter {self.name!r} was {done} after fully_shard(), so what its module "
                    "computes with is not synchronised; change the model before wrapping it"
                )
            exchanged = True
        return exchanged

    def check_data(self) -> None:
        """
        Raises:
            RuntimeError: a script has assigned to `.data`, which changes no values of a DTensor.
        """
        if self.local is self._local and storage_address(self.sharded) != self._wrapper._cdata:
            raise RuntimeError(
                f"something was assigned to the .data of parameter {self.name!r}, which is a "
                "DTensor: torch leaves its values as they were. Write into it instead, as with "
                "param.data.copy_(values) or param.data.clamp_(-1, 1); values may be a DTensor, "
                "such as a copy of the parameter, or torch.distributed.tensor.distribute_tensor("
                "whole, param.device_mesh, param.placements)"
            )

    def watch(self, gradients: core.UnitGradients) -> None:
        """Watch the gradients of `whole`, and show them to the hooks of the parameter."""
        if self.unsharded is None or not self.unsharded.requires_grad:
            return
        if self.watched is None:
            self.watched = gradients.watch(self.unsharded)
        if self._relay is None and self.sharded._backward_hooks:
            self._relay = self.unsharded.register_hook(self._call_tensor_hooks)

    def _call_tensor_hooks(self, gradient: torch.Tensor) -> torch.Tensor:
        """Show this rank's own gradient to hooks, as an unsharded parameter does."""
        for hook in tensor_hooks(self.sharded):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def call_hooks(self) -> None:
        """Call the hooks that run when autograd has set a gradient."""
        for hook in accumulate_hooks(self.sharded):
            hook(self.sharded)

    def has_hooks(self) -> bool:
        return bool(accumulate_hooks(self.sharded))

    def _fresh_gradient(self) -> torch.Tensor | None:
        """Return and remove what autograd has accumulated."""
        if self.unsharded is None:
            return None
        fresh, self.unsharded.grad = self.unsharded.grad, None
        if fresh is not None and fresh.is_sparse:
            raise RuntimeError(
                f"parameter {self.name!r} has a sparse gradient, which shards cannot have: make it "
                "dense, as with nn.Embedding(sparse=False), or use zero=2"
            )
        if fresh is None or self.inner is None:
            return fresh
        return local_gradient(fresh, self.inner)

    def take_whole_gradient(self) -> torch.Tensor | None:
        """Return and remove what this rank has accumulated for the whole parameter."""
        fresh = self._fresh_gradient()
        partial, self.partial = self.partial, None
        if partial is None or fresh is None:
            return fresh if partial is None else partial
        return partial.add_(fresh)

    def keep_whole_gradient(self, dtype: torch.dtype) -> None:
        """Keep what was accumulated in `dtype` for later backwards."""
        if self.unsharded is None or self.unsharded.grad is None:
            return
        if self.partial is None and self.unsharded.grad.dtype == dtype:
            return
        fresh = self._fresh_gradient()
        assert fresh is not None
        self.partial = fresh.to(dtype) if self.partial is None else self.partial.add_(fresh)

    def lend_gradient(self) -> None:
        """Let a script find the share's gradient at `whole`, to read, change or reset it."""
        if self.unsharded is None or self.sharded.grad is None or self.unsharded.grad is not None:
            return
        if self.inner is None:
            seen = _like(self.sharded.grad, self.unsharded)
            self._lent = _Lent(self.sharded.grad, seen, seen._version)
            self.unsharded.grad = seen

    def take_script_gradient(self) -> None:
        """Give the share what the script has left there: that gradient, another one, or none.

        Raises:
            RuntimeError: the script has set a gradient there, and changed that of the share.
        """
        lent, self._lent = self._lent, None
        if lent is None or self.unsharded is None:
            return
        found = self.unsharded.grad
        changed = found is not lent.seen or found._version != lent.version
        if changed and self.sharded.grad is lent.gradient:
            self.take_set_gradient()
        elif found is not None and found is not lent.seen:
            raise RuntimeError(
                f"a gradient of parameter {self.name!r} was set where it is unsharded, and cleared "
                "or set where the optimizer sees it: which one counts? Clear gradients with "
                "model.zero_grad(), or call model.reshard() before gradients are set"
            )
        self.unsharded.grad = None

    @torch.no_grad()
    def take_set_gradient(self) -> None:
        """Give the share the gradient that a script has set at the unsharded parameter, or none."""
        assert self.unsharded is not None
        found = self.unsharded.grad
        if self.inner is None and isinstance(found, DTensor):
            self.sharded.grad, self.unsharded.grad = _like(found, self.local), None
            return
        whole = self._fresh_gradient()
        self.sharded.grad = None
        if whole is not None:
            self.set_gradient(self.share_of(whole.detach()).to(self.local, copy=True))

    def freeze_alike(self) -> None:
        """Make share and whole require a gradient alike: a script may freeze or unfreeze either."""
        if (
            self.unsharded is not None
            and self.unsharded.requires_grad != self.sharded.requires_grad
        ):
            wanted = not self.trained  # which one of them has been set to
            self.unsharded.requires_grad_(wanted)
            self.sharded.requires_grad_(wanted)
        self.trained = self.sharded.requires_grad

    def show_sharded(self) -> None:
        self.take_script_gradient()
        self.freeze_alike()
        for home in self.homes:
            home.put(self.sharded)

    def show_whole(self) -> None:
        assert self.unsharded is not None
        self.take_script_gradient()
        self.freeze_alike()
        for home in self.homes:
            home.put(self.unsharded)


def _like(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as it is, or a copy with the dtype and on the device of `other`."""
    local = local_of(gradient)
    moved = local.to(other.device, other.dtype)
    if moved is local:
        return gradient
    return make_dtensor(moved, with_dtype(spec_of(gradient), other.dtype))


def find_homes(modules: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> list[list[Home]]:
    """Return every place of each parameter inside `modules`."""
    homes: dict[int, list[Home]] = {id(param): [] for param in params}
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, param in module._parameters.items():
                if param is not None and id(param) in homes:
                    homes[id(param)].append(Home(module, name))
    return [homes[id(param)] for param in params]
