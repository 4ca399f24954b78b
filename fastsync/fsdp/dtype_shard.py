"""Parameters of a unit of one dtype: their shares in one tensor, and their way in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fastsync._torch import set_local, with_own_storage
from fastsync.config.policy import UnitWires
from fastsync.fsdp.cpu_offload import Arriving, staging_of
from fastsync.fsdp.group_codes import Codes, gradient_codes, parameter_codes
from fastsync.fsdp.group_links import FlatGather, Links
from fastsync.fsdp.mesh import Place
from fastsync.fsdp.shard_layout import ChunkLayout, lay_out, unsharded_offsets
from fastsync.fsdp.sharded_param import ShardedParam
from fastsync.reducer import core
from fastsync.reducer.mean_weights import Number

# Dtypes that dtype shards cast, sum and scale.
TRAINABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# A share of so many bytes is worth a message of its own.
DIRECT_BYTES = 128 << 10


@dataclass(frozen=True)
class MixedDTypes:
    """Dtypes that parameters compute in, and gradients are reduced in; None: those they have.

    Attributes:
        policy: policy with these dtypes; extensions of tensor subclasses receive it.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)


@dataclass(frozen=True)
class _Reducing:
    """Gradients that travel.

    Attributes:
        laid, layout: where they lie.
        missed: this rank has none for some of the parameters.
    """

    laid: ChunkLayout
    layout: core.UnitLayout
    missed: bool


class PostForwardShard:
    """This rank's part of the memory of unsharded parameters, kept between forward and backward.

    The parts of few ranks, which may be those of one machine, make up the unsharded ones. So
    backward gathers from these ranks alone.

    Args:
        whole: that memory, one-dimensional.
        group: group whose ranks keep an equal part each.
    """

    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.group = group
        count = math.ceil(whole.numel() / group.size())
        begin = min(count * group.rank(), whole.numel())
        found = whole[begin : begin + count]
        self.part = whole.new_zeros(count)
        self.part[: found.numel()].copy_(found)
        self.gather: FlatGather | None = None


class DtypeShard:
    """Shards of a unit's parameters of one dtype, side by side in `shard`.

    `sync_params()` restores that after a script has assigned other tensors.
    """

    def __init__(
        self, params: Sequence[ShardedParam], place: Place, mixed: MixedDTypes, wires: UnitWires
    ) -> None:
        self.params, self.place, self.mixed, self.wires = list(params), place, mixed, wires
        self.partial: torch.Tensor | None = None  # sums that replicas have not added up yet
        self._layouts: dict[tuple[int, ...], tuple[ChunkLayout, core.UnitLayout]] = {}
        self._reducing: _Reducing | None = None
        self._kept: PostForwardShard | None = None
        self.links: Links | None = None
        self._tag = 0
        self.name: core.UnitName | None = None
        self._core: core.Unit | None = None
        self._gathered_bytes = 0  # once they are known
        self.arriving: list[tuple[_Reducing, Arriving]] = []
        self._set_shard(self._new_shard())

    @property
    def dtype(self) -> torch.dtype:
        """Return the storage dtype of the shares."""
        return self.params[0].sharded.dtype

    @property
    def compute(self) -> torch.dtype:
        return self.mixed.compute or self.dtype

    @property
    def reduce(self) -> torch.dtype:
        return self.mixed.reduce or self.compute

    # --- what travels

    def _gathered_as(self) -> Codes | None:
        """Return the codes of the parameter all-gather; None: raw elements."""
        return parameter_codes(self.wires, self.place.world, self.dtype, self.compute)

    def _reduced_as(self) -> Codes | None:
        """Return the codes of the gradient reduce-scatter; None: elements of dtype `reduce`."""
        dtypes = (self.dtype, self.compute)
        return gradient_codes(self.wires, self.place.world, dtypes, self.reduce)

    def travels_as(self) -> str:
        dtypes = f"{self.dtype} as {self.compute}, gradients as {self.reduce}"
        return f"{dtypes} (wire={self.wires.describe()})"

    def _core_layout_of(self, laid: ChunkLayout, codes: Codes | None) -> core.UnitLayout:
        name = self.params[0].name
        spec = None if codes is None else codes.spec(laid, self.place.world, name)
        return core.UnitLayout(laid.places, laid.chunk, laid.packed, laid.flags, spec)

    # --- shares

    def _direct_from(self, dtype: torch.dtype) -> int | None:
        return DIRECT_BYTES // dtype.itemsize if self.place.by_messages else None

    def _lay_out(
        self, params: Sequence[int], direct_from: int | None, flags: bool, codes: Codes | None
    ) -> ChunkLayout:
        """Return the layout of a chunk; codes travel in one message, whatever the sizes."""
        shapes, world = [m.shape for m in self.params], self.place.world
        if codes is not None:
            return lay_out(shapes, params, world, None, flags, codes.block)
        return lay_out(shapes, params, world, direct_from, flags)

    def _layout(self) -> ChunkLayout:
        every, direct_from = range(len(self.params)), self._direct_from(self.compute)
        return self._lay_out(every, direct_from, flags=False, codes=self._gathered_as())

    def _room(self, shard: torch.Tensor, layout: ChunkLayout, index: int) -> torch.Tensor:
        sizes = self.params[index].local_sizes()
        offset = layout.offsets[index]
        return shard[offset : offset + math.prod(sizes)].view(sizes)

    @torch.no_grad()
    def _new_shard(self) -> torch.Tensor:
        """Move all shares into one new tensor."""
        layout = self._layout()
        like, offload = self.params[0].local, self.place.offload
        if offload is None or like.device != self.place.home:
            shard = torch.zeros(layout.chunk, dtype=like.dtype, device=like.device)
        else:
            shard = offload.empty(layout.chunk, like.dtype).zero_()
        for index, param in enumerate(self.params):
            room = self._room(shard, layout, index)
            if not room.is_meta:
                room.copy_(param.local)
            set_local(param.sharded, with_own_storage(room))
            param.note_local()
        return shard

    def _set_shard(self, shard: torch.Tensor) -> None:
        self.shard = shard
        self.staging = staging_of(shard, self.place.device, self.place.offload)

    def _is_synced(self) -> bool:
        if self.shard.is_meta and all(param.local.is_meta for param in self.params):
            return True
        layout = self._layout()
        for index, param in enumerate(self.params):
            local = param.local
            begin = self.shard.data_ptr() + layout.offsets[index] * self.shard.itemsize
            same_kind = (local.dtype, local.device) == (self.shard.dtype, self.shard.device)
            if not same_kind or (local.numel() > 0 and local.data_ptr() != begin):
                return False
        return True

    def sync_params(self) -> None:
        """Take in what a loaded state dict, or a conversion of the module, has put in place.

        Raises:
            RuntimeError: a parameter has no memory yet, or lies elsewhere than the mesh, or the
                params are not of one dtype any more.
        """
        for param in self.params:
            found = param.homes[0].get()
            if found is not param.unsharded and found is not param.sharded:
                self._take_in(param, found)
        on_meta = {param.local.is_meta for param in self.params}
        if len(on_meta) > 1 or self._is_synced():
            return  # the others are still to be loaded
        self._check_dtypes()
        before = (self.shard.dtype, self.shard.device)
        for param in self.params:
            param.set_spec(param.sharded.dtype)
        self._set_shard(self._new_shard())
        if self._core is not None and (self.shard.dtype, self.shard.device) == before:
            self._core.set_shard(self.staging.source, self._core_layout())
        else:
            self._core = None
            self._gathered_bytes = 0
            self._layouts.clear()

    def _check_dtypes(self) -> None:
        if len({param.sharded.dtype for param in self.params}) != 1:
            names = ", ".join(f"{m.name!r} is {m.sharded.dtype}" for m in self.params)
            raise RuntimeError(
                f"parameters of one unit have become of several dtypes: {names}; convert all of "
                "them, or convert the module before fully_shard()"
            )

    def _take_in(self, param: ShardedParam, found: nn.Parameter) -> None:
        if not found.is_leaf:
            raise RuntimeError(
                f"parameter {param.name!r} was exchanged for the result of a computation, as by "
                "torch.func.functional_call(): gradients would not come to what it was computed "
                "from. Compute it within forward, or use zero=2"
            )
        if not isinstance(found, DTensor) or found.shape != param.sharded.shape:
            raise RuntimeError(
                f"parameter {param.name!r} was exchanged for a {type(found).__name__} of sizes "
                f"{tuple(found.shape)}, where fully_shard() needs a DTensor of sizes "
                f"{tuple(param.sharded.shape)}; load DTensors, or use "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict()"
            )
        param.sharded = found

    def _core_layout(self) -> core.UnitLayout:
        return self._core_layout_of(self._layout(), self._gathered_as())

    def check_memory(self) -> None:
        """
        Raises:
            RuntimeError: some parameters are still on the meta device, or on another than the mesh.
        """
        on_meta = [m.name for m in self.params if m.local.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta}\nFor example, call "
                "module.to_empty(device) to materialize to device and call "
                "module.reset_parameters() on each module to initialize values."
            )
        elsewhere = [m.name for m in self.params if m.local.device != self.place.home]
        if elsewhere and self.place.offload is not None:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading, but "
                f"these are on another device: {elsewhere}\nFor example, load a CPU state dict or "
                'call module.to_empty(device="cpu"); module.cpu() brings back what was moved.'
            )
        if elsewhere:
            raise RuntimeError(
                f"the mesh is on {self.place.device}, but these parameters are not: {elsewhere}; "
                "move the module to that device"
            )

    # --- bytes, of any rank

    def bytes_to_gather(self) -> int:
        """Return the bytes of unsharded parameters, and of buffers that their shares travel in."""
        if not self._gathered_bytes:
            shapes, layout = [m.shape for m in self.params], self._layout()
            whole = unsharded_offsets(shapes)[-1] + math.prod(shapes[-1].sizes)
            codes, elements = self._gathered_as(), whole
            if codes is None:
                lowered = layout.chunk if self.compute != self.dtype else 0
                elements += lowered + self.place.world * layout.packed
            coded = 0 if codes is None else codes.nbytes(layout, self.place.world)
            staged = layout.chunk * self.dtype.itemsize if self.staging.copies else 0
            self._gathered_bytes = elements * self.compute.itemsize + coded + staged
        return self._gathered_bytes

    def bytes_to_reduce(self) -> int:
        """Return an upper bound on the bytes of buffers that gradients travel
        in, without the sums.
        """
        trained = self.trained()
        if not trained:
            return 0
        layout, codes = self._layout_of(trained)[0], self._reduced_as()
        if codes is not None:
            return 2 * codes.nbytes(layout, self.place.world)  # those that leave, and that come
        chunks = self.place.world - 1 if self.place.by_messages else 1
        elements = self.place.world * layout.packed + chunks * layout.chunk
        return elements * self.reduce.itemsize

    # --- whole parameters

    @property
    def begun(self) -> bool:
        """Return whether it has been gathered."""
        return self._core is not None

    def connect(self, links: Links) -> None:
        """Take the links to gather by, unless there are some.

        The tag is taken now, in the same order on every rank: at the first gather ranks that run
        different units would agree on one, and mistake one's parameters for another's.
        """
        if self.links is None:
            self.links, self._tag = links, links.next_tag()

    def call(self, name: core.UnitName) -> None:
        """Set the name in errors and timelines."""
        self.name = name
        if self._core is not None:
            self._core.set_name(name)

    def _make_core(self) -> core.Unit:
        assert self.links is not None
        self.check_memory()
        shapes = [m.shape for m in self.params]
        offsets = unsharded_offsets(shapes)
        params = [(s.sizes, s.dim, o) for s, o in zip(shapes, offsets, strict=True)]
        dtypes = (self.dtype, self.compute, self.reduce)
        made = core.Unit(self.links.core, params, dtypes, str(self.place.device), self._tag)
        if self.name is not None:
            made.set_name(self.name)
        return made

    def _way(self) -> core.Unit:
        """Return the C++ unit, which exists once the parameters have memory."""
        if self._core is None:
            self._core = self._make_core()
            self._core.set_shard(self.staging.source, self._core_layout())
            for index, param in enumerate(self.params):
                param.make_unsharded(self._core.whole(index))
        return self._core

    def start_gather(self) -> None:
        if self._kept is None:
            way = self._way()
            with self.staging.sending():
                way.start_gather()
        else:
            self._gather_kept(self._kept)

    def finish_gather(self) -> None:
        if self._kept is None:
            self._way().finish_gather()
            self.staging.arrived()
        else:
            self._finish_small_gather(self._gather_kept(self._kept))

    def _gather_kept(self, kept: PostForwardShard) -> FlatGather:
        if kept.gather is None:
            assert self.links is not None and self.name is not None
            kept.gather = FlatGather(kept.part, kept.group, self.links.shares.ranks, self.name)
        return kept.gather

    @torch.no_grad()
    def _finish_small_gather(self, gather: FlatGather) -> None:
        gathered, whole = gather.wait(), self._way().allocate()
        whole.copy_(gathered[: whole.numel()])
        gather.arrived()
        self._kept = None

    @torch.no_grad()
    def release(self, post_forward_group: dist.ProcessGroup | None = None) -> None:
        """Take the memory of unsharded parameters away.

        Args:
            post_forward_group: ranks that keep a part of them each, for the next gather; None:
                the next one is of the shares. Not None only while there is that memory.
        """
        self.drop_part()
        if self._core is None:
            return
        if post_forward_group is not None:
            self._kept = PostForwardShard(self._core.allocate(), post_forward_group)
        self._core.release()
        self.staging.arrived()
        self.staging.wait()

    def drop_part(self) -> None:
        """Drop the kept part; the next gather is of the shares."""
        if self._kept is not None and self._kept.gather is not None:
            self._kept.gather.wait()
        self._kept = None

    # --- gradients

    def trained(self) -> tuple[int, ...]:
        """The parameters that need gradients."""
        return tuple(i for i, m in enumerate(self.params) if m.sharded.requires_grad)

    def has_gradients(self) -> bool:
        """Return whether this rank has gradients that have not travelled, of what is trained."""
        return any(
            m.partial is not None or (m.unsharded is not None and m.unsharded.grad is not None)
            for m in self.params
            if m.sharded.requires_grad
        )

    def keep_gradients(self) -> None:
        """Keep what has been accumulated for a later backward."""
        for param in self.params:
            param.keep_whole_gradient(self.reduce)

    def _layout_of(self, trained: tuple[int, ...]) -> tuple[ChunkLayout, core.UnitLayout]:
        if trained not in self._layouts:
            codes = self._reduced_as()
            direct_from = self._direct_from(self.reduce) if self.reduce == self.compute else None
            laid = self._lay_out(trained, direct_from, flags=True, codes=codes)
            self._layouts[trained] = (laid, self._core_layout_of(laid, codes))
        return self._layouts[trained]

    def start_reduce(self, scale: Number) -> bool:
        """Send what has been accumulated; return whether there is anything to send. Collective."""
        trained = self.trained()
        if not trained:
            return False
        laid, layout = self._layout_of(trained)
        gradients = [self._take(self.params[i]) for i in laid.params]
        missed = any(gradient is None for gradient in gradients)
        self._reducing = _Reducing(laid, layout, missed)
        self._way().start_reduce(layout, gradients, scale)
        return True

    def _take(self, param: ShardedParam) -> torch.Tensor | None:
        return param.take_whole_gradient()

    def finish_reduce(self) -> torch.Tensor:
        """The sums of this rank's shares, scaled."""
        return self._way().finish_reduce()

    def deliver(self, sums: torch.Tensor) -> None:
        """Turn sums into gradients of this rank's shares, at once or by `finalize_gradients()`."""
        assert self._reducing is not None
        self.arriving.append((self._reducing, self.staging.bring(sums)))
        params = [self.params[i] for i in self._reducing.laid.params]
        # The host waits for what it adds to a gradient, or shows to hooks, while backward goes on.
        wanted = any(m.has_hooks() or m.gradient() is not None for m in params)
        if wanted or not self.staging.copies:
            self._finalize_gradients()

    def _finalize_gradients(self) -> None:
        """Set the gradients of this rank's shares, or add to them, once everything is there."""
        arriving, self.arriving = self.arriving, []
        for reducing, sums in arriving:
            self._add(reducing, sums.wait())

    def _add(self, reducing: _Reducing, sums: torch.Tensor) -> None:
        params = [self.params[i] for i in reducing.laid.params]
        before = [param.gradient() for param in params]
        found = self._way().deliver(reducing.layout, sums, before, reducing.missed)
        for param, had, local in zip(params, before, found, strict=True):
            if local is not None and had is None:
                param.set_gradient(local)
        for param, local in zip(params, found, strict=True):
            if local is not None and param.has_hooks():
                param.call_hooks()


def release_gradients(dtype_shards: Sequence[DtypeShard]) -> None:
    """Wait until this rank's shares may be written to: no copy reads them any more."""
    for dtype_shard in dtype_shards:
        dtype_shard.staging.wait()


def finalize_gradients(dtype_shards: Sequence[DtypeShard]) -> None:
    """Finish the gradients that are on their way to the CPU."""
    for dtype_shard in dtype_shards:
        dtype_shard._finalize_gradients()
