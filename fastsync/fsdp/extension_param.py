"""Parameters that say themselves what is gathered of them: tensor subclasses with an extension.

A local tensor may have two methods, which FSDP2 calls too. `fsdp_pre_all_gather()` returns tensors
that stand for this rank's share, of any number and dtype, and metadata; the ranks gather each of
them. `fsdp_post_all_gather()` makes a whole tensor of the results the first time, and from then on
fills that one. It also says which memory it is in, which comes and goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastsync._torch import all_gather_flat, is_wrapper
from fastsync.faults.consensus import RankMismatchError, Statement, agree
from fastsync.fsdp.dtype_shard import TRAINABLE, DtypeShard
from fastsync.fsdp.mesh import Place, RefusedError
from fastsync.fsdp.shard_layout import Shape
from fastsync.fsdp.sharded_param import ShardedParam
from fastsync.reducer import core
from fastsync.reducer.monitor import awaited, watched

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_GATHER = f"the gather of what {_PRE}() gives"
# Dtype and sizes.
_Kind = tuple[torch.dtype, tuple[int, ...]]


class _Extension(Protocol):
    """Methods that a local tensor may have."""

    def fsdp_pre_all_gather(self, *given: object) -> tuple[Iterable[torch.Tensor], object]: ...

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: object,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Iterable[torch.Tensor]] | None: ...


def has_extension(local: torch.Tensor) -> bool:
    """Return whether a local tensor takes part in gathers by methods of its own."""
    return hasattr(local, _PRE)


def stands_apart(local: torch.Tensor) -> bool:
    """Return whether a local tensor cannot be a part of plain memory: it has an extension, or
    parts.

    Raises:
        RefusedError: it has one half of an extension.
    """
    if hasattr(local, _PRE) != hasattr(local, _POST):
        raise RefusedError(
            f"Both {_PRE} and {_POST} should be defined if using all-gather extensions: "
            f"{type(local).__name__}"
        )
    return hasattr(local, _PRE) or is_wrapper(local)


def own_share(local: torch.Tensor, shape: Shape, place: Place) -> torch.Tensor:
    """Return a copy of this rank's share, by what FSDP2 calls too: subclasses know little else."""
    chunks = torch.chunk(local, place.world, dim=shape.dim)
    padded = local.new_zeros(shape.local(0, place.world))
    share = padded.narrow(shape.dim, 0, shape.count(place.rank, place.world))
    if place.rank < len(chunks):
        share.copy_(chunks[place.rank])
    return share


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a subclass, as an operation with a plain tensor sees them."""
    if type(tensor) is torch.Tensor:
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    made.copy_(tensor)
    return made


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(sizes), device="meta").stride()


class _Memory:
    """Storages that come and go, with the sizes that they had."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._held = [(storage, storage.nbytes()) for storage in storages]

    def allocate(self) -> None:
        for storage, size in self._held:
            if storage.nbytes() != size:
                storage.resize_(size)

    def take_back(self) -> None:
        for storage, _ in self._held:
            if storage.nbytes() != 0:
                storage.resize_(0)


@dataclass
class _GatherInputs:
    """Inputs of a parameter to a gather; `extended`: its extension chose them."""

    inputs: list[torch.Tensor]
    metadata: object
    extended: bool

    @property
    def kinds(self) -> tuple[bool, list[_Kind]]:
        return self.extended, [(t.dtype, tuple(t.shape)) for t in self.inputs]


class _Part:
    """Memory in which a parameter's gathers end, the same each time.

    Attributes:
        kinds: dtypes and shapes of what every rank gives.
        outputs: what all ranks gave, by input.
        inner: other memory of the whole tensor.
    """

    def __init__(self, given: _GatherInputs, dim: int, place: Place) -> None:
        self.kinds = given.kinds
        self._dim, self._place = dim, place
        self.outputs = [self._make_output(t) for t in given.inputs]
        self._memory, self.inner = _Memory(self.outputs), _Memory(())
        self.metadata: object = None
        self._under_way: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        self.release()

    def _make_output(self, like: torch.Tensor) -> torch.Tensor:
        dim = self._dim_of(like)
        sizes = list(like.shape) or [1]
        sizes[dim] *= self._place.world
        return torch.empty(sizes, dtype=like.dtype, device=self._place.device)

    def _dim_of(self, tensor: torch.Tensor) -> int:
        """Return the dimension along which the ranks' tensors lie side by side."""
        return self._dim if tensor.ndim > self._dim else 0

    def start(self, given: _GatherInputs) -> None:
        """Start to gather from all ranks. Collective."""
        self._memory.allocate()
        self.metadata = given.metadata
        for tensor, output in zip(given.inputs, self.outputs, strict=True):
            if output.numel() == 0:
                continue
            # A detached view of its own: autograd is not to see that it changes.
            into = output.data if self._dim_of(tensor) == 0 else torch.empty_like(output)
            sent = _plain(tensor).contiguous().view(-1).view(torch.uint8)
            received = into.view(-1).view(torch.uint8)
            work = all_gather_flat(received, sent, self._place.group)
            self._under_way.append((work, into, output))

    def finish(self) -> None:
        """Wait until the tensors of all ranks are there."""
        pending, self._under_way = self._under_way, []
        for work, into, output in pending:
            awaited(self._place.group, _GATHER, work)
            if into.data_ptr() == output.data_ptr():
                continue
            shape = list(output.shape)
            shape[self._dim] //= self._place.world
            parts = into.view(self._place.world, *shape).unbind(0)
            torch.cat(parts, dim=self._dim, out=output.data)

    def release(self) -> None:
        for work, _, _ in self._under_way:
            awaited(self._place.group, _GATHER, work)
        self._under_way, self.metadata = [], None
        self._memory.take_back()
        self.inner.take_back()


@dataclass
class _Gathered:
    """Gathered parts of an ExtendedShard, or parts that are about to be gathered."""

    parts: list[_Part] = field(default_factory=list)
    under_way: bool = False
    has_memory: bool = False


class ExtensionShard(DtypeShard):
    """DtypeShard whose parameters are apart from each other, each a tensor of its own class.

    Gradients go the way of plain parameters' gradients. Collectives are the process group's; what
    they send to gather is not among the unit's counters.
    """

    _gathered: _Gathered
    _stored: torch.dtype

    def _new_shard(self) -> torch.Tensor:
        """Give a tensor memory of its own, where it was a part of plain
        memory; there is no shard.
        """
        self._gathered, self._stored = _Gathered(), self.dtype
        for param in self.params:
            if type(param.local) is torch.Tensor and not param.local.is_meta:
                param.local.data = param.local.clone()
        return torch.empty(0)

    # --- dtypes

    @property
    def _requested_dtype(self) -> torch.dtype:
        """The dtype that unsharded parameters are to have."""
        lower = self.mixed.compute if self.dtype.is_floating_point else None
        return lower or self.dtype

    @property
    def compute(self) -> torch.dtype:
        """Return the dtype of the gradients: extensions choose that of unsharded parameters."""
        found: torch.dtype | None = None
        for param in self.params:
            if param.unsharded is not None and param.sharded.requires_grad:
                dtype = param.unsharded.dtype
                found = dtype if found is None else torch.promote_types(found, dtype)
        return found or self._requested_dtype

    # --- shares

    def sync_params(self) -> None:
        for param in self.params:
            found = param.homes[0].get()
            if found is not param.unsharded and found is not param.sharded:
                self._take_in(param, found)
        if all(param.sharded.dtype == self._stored for param in self.params):
            return
        self._check_dtypes()
        for param in self.params:
            param.set_spec(param.sharded.dtype)
            param.unsharded = None
        self._core = None
        self._layouts.clear()
        self._gathered, self._stored = _Gathered(), self.dtype

    # --- whole parameters

    @property
    def begun(self) -> bool:
        return bool(self._gathered.parts)

    def start_gather(self) -> None:
        if self._gathered.has_memory or self._gathered.under_way:
            return
        self.check_memory()
        given = self._ask_all() if self._gathered.parts else self._ask_first()
        for part, each in zip(self._gathered.parts, given, strict=True):
            part.start(each)
        self._gathered.under_way = True

    def _ask_all(self) -> list[_GatherInputs]:
        given = [self._ask(param) for param in self.params]
        for param, part, each in zip(self.params, self._gathered.parts, given, strict=True):
            if each.kinds != part.kinds:
                raise RuntimeError(
                    f"parameter {param.name!r} gave {_kinds_text(part.kinds)} to its first "
                    f"gather, but gives {_kinds_text(each.kinds)} now, on rank {self.place.rank}: "
                    f"{_PRE}() has to return the same sizes and dtypes each time"
                )
        return given

    def _ask_first(self) -> list[_GatherInputs]:
        """Ask the parameters, and find out whether ranks differ, which would hang. Collective."""
        given, failed = [], None
        try:
            given = [self._ask(param) for param in self.params]
        except Exception as error:  # which the other ranks have to hear of
            failed = error
        pairs = zip(self.params, given, strict=False)
        statement = {self._about(param): _kinds_text(each.kinds) for param, each in pairs}
        what = "" if failed is None else f"{type(failed).__name__}: {failed}"
        try:
            at = self.place
            run = partial(watched, at.group, f"the comparison of what {_PRE}() gives")
            agree(Statement(statement, (), what), at.group, at.device, f"{_PRE}():", run)
        except RankMismatchError as report:
            if failed is None:
                raise
            raise failed from report
        if failed is not None:
            raise failed
        dims = [param.shape.dim for param in self.params]
        parts = [_Part(each, dim, self.place) for each, dim in zip(given, dims, strict=True)]
        self._gathered.parts = parts
        return given

    def _about(self, param: ShardedParam) -> str:
        text = f"what parameter {param.name!r} gives to a gather"
        if param.shape.sizes[param.shape.dim] % self.place.world:
            padded = param.shape.local(0, self.place.world)
            text += f" (shares are uneven: {_PRE}() has to pad them to {padded})"
        return text

    @torch.no_grad()
    def _ask(self, param: ShardedParam) -> _GatherInputs:
        if not has_extension(param.local):
            return _GatherInputs([self._padded(param)], None, extended=False)
        local = param.local
        if local.device != self.place.device:
            local = local.to(self.place.device)  # the host waits for it: classes know no other way
        pre = cast(_Extension, local).fsdp_pre_all_gather
        signature = inspect.signature(pre)
        mesh, sizes = _shard_mesh(self.place), torch.Size(param.shape.sizes)
        if len(signature.parameters) == 1:
            inputs, metadata = pre(mesh)
        elif len(signature.parameters) == 5:
            module, policy = param.homes[0].module, self.mixed.policy
            inputs, metadata = pre(mesh, sizes, _strides(sizes), module, policy)
        else:
            raise RefusedError(
                f"Invalid {_PRE} of parameter {param.name!r}: {signature}\nExpects {_PRE}(self, "
                "mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
                "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        return _GatherInputs(list(inputs), metadata, extended=True)

    def _padded(self, param: ShardedParam) -> torch.Tensor:
        """The values of a share without an extension."""
        local, dim = param.local, param.shape.dim
        sizes = param.shape.local(0, self.place.world)
        plain = torch.zeros(sizes, dtype=self._requested_dtype, device=self.place.device)
        plain.narrow(dim, 0, local.shape[dim]).copy_(local)
        return plain

    @torch.no_grad()
    def finish_gather(self) -> None:
        if not self._gathered.under_way:
            return
        self._gathered.under_way = False
        for param, part in zip(self.params, self._gathered.parts, strict=True):
            part.finish()
            self._assemble(param, part)
        self._gathered.has_memory = True

    def _assemble(self, param: ShardedParam, part: _Part) -> None:
        outputs, extended = tuple(part.outputs), part.kinds[0]
        post = cast(_Extension, param.local).fsdp_post_all_gather if extended else None
        metadata, part.metadata = part.metadata, None
        if param.unsharded is not None:
            part.inner.allocate()
            if post is not None:
                post(outputs, metadata, self._requested_dtype, out=param.unsharded)
            return
        made: tuple[torch.Tensor, Iterable[torch.Tensor]] | None = (outputs[0], ())
        if post is not None:
            made = post(outputs, metadata, self._requested_dtype)
        if made is None:
            raise RefusedError(
                f"{_POST}() of parameter {param.name!r} returned None where it was called without "
                "out: it has to return the whole tensor, and tensors in whose memory that is"
            )
        whole, inner = made
        part.inner = _Memory(inner)
        param.make_unsharded(_cut(whole, param.shape.sizes))

    def release(self, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Release what was gathered; the next gather is of the shares in any case."""
        for part in self._gathered.parts:
            part.release()
        self._gathered.under_way = self._gathered.has_memory = False

    # --- gradients

    def _way(self) -> core.Unit:
        """Return the C++ unit, which is for gradients alone."""
        if self._core is None:
            if self.compute not in TRAINABLE:
                names = [m.name for m in self.params if m.sharded.requires_grad]
                raise RefusedError(
                    f"gradients of {names} would be of {self.compute}, the dtype that {_POST}() "
                    f"has chosen; fastsync.fully_shard reduces {[*map(str, TRAINABLE)]}"
                )
            self._core = self._make_core()
        return self._core

    def _take(self, param: ShardedParam) -> torch.Tensor | None:
        gradient = super()._take(param)
        return None if gradient is None else _plain(gradient)


def _kinds_text(kinds: tuple[bool, list[_Kind]]) -> str:
    extended, given = kinds
    text = " and ".join(f"{dtype} of sizes {sizes}" for dtype, sizes in given) or "nothing"
    return text if extended else f"{text} without an extension"


def _shard_mesh(place: Place) -> DeviceMesh:
    """Return the mesh of the ranks that share."""
    mesh = place.mesh
    return mesh if mesh.mesh_dim_names is None or mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


def _cut(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the tensor without its padding."""
    if tuple(tensor.shape) == tuple(sizes) and tensor.is_contiguous():
        return tensor
    return torch.as_strided(tensor, tuple(sizes), _strides(sizes), storage_offset=0)
