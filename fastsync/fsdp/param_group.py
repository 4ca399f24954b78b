"""A unit: the parameters of one or several modules that are gathered and reduced together.

A unit's states::

    sharded --start_gather()--> (under way) --finish_gather()--> whole --reshard()--> sharded

Modules have the whole parameters registered while the unit is whole, and the sharded ones
otherwise. Each step of a backward that reaches the unit's end takes its gradients to the ranks
that keep them: `start_reduce()`, then, after the units that follow have started, `finish_reduce()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import nn

from fastsync.config.policy import UnitWires
from fastsync.fsdp.dtype_shard import TRAINABLE, DtypeShard, MixedDTypes
from fastsync.fsdp.extension_param import ExtensionShard, has_extension, stands_apart
from fastsync.fsdp.group_links import Links, wait_for
from fastsync.fsdp.mesh import Place
from fastsync.fsdp.raw_param import RawShard
from fastsync.fsdp.sharded_param import ShardedParam
from fastsync.reducer import core
from fastsync.reducer.mean_weights import Number


class Moment(Enum):
    """Phase of a unit, or of a module's state."""

    IDLE = auto()
    FORWARD = auto()
    BEFORE_BACKWARD = auto()
    AFTER_BACKWARD = auto()


@dataclass
class Switches:
    """Settings that a script may change between two steps; see FSDPModule's methods."""

    reduce: bool = True
    all_reduce: bool = True
    reshard_after_forward: bool = True
    reshard_to: int | None = None  # after forward, so many ranks keep a part each for backward
    reshard_after_backward: bool = True
    gather_in_backward: bool = True
    divisor: float | None = None
    hook: Callable[[torch.Tensor], object] | None = None
    hook_stream: torch.Stream | None = None


@dataclass
class _Summing:
    """Sums that the replicas add up."""

    dtype_shard: DtypeShard
    sums: torch.Tensor
    work: dist.Work
    transfer: core.Transfer


@dataclass
class Unit:
    """Parameters that are gathered and reduced together.

    Attributes:
        modules: the modules that it was made for.
        concealed: modules have the shares registered while the unsharded parameters are kept.
        gradients: the watch for gradients that come unannounced.
        running: forwards that have begun and not ended, without those that compute again.
        kept_by_default: kept between forward and backward, without a request of the script.
        expected: forwards whose backward has not reached the unit's end.
        busy: the state whose backward computes with these parameters: the module's, or that of one
            with a tied weight.
        owes: a backward has left gradients to a later one. That is so on every rank, while
            gradients of this rank may be missing: its batch may have needed none of the parameters.
        stale: an optimizer has stepped since the gather, so the next forward gathers again.
        post_forward_group: the ranks that share what this one does between forward and backward;
            None: those that share the parameters.
        places: of its forwards in the order of all units' forwards, those without backward so far.
    """

    modules: tuple[nn.Module, ...]
    place: Place
    dtype_shards: list[DtypeShard]
    switches: Switches = field(default_factory=Switches)
    moment: Moment = Moment.IDLE
    is_unsharded: bool = False
    concealed: bool = False
    gradients: core.UnitGradients | None = None
    running: int = 0
    kept_by_default: bool = False
    expected: int = 0
    touched: bool = False
    busy: set[int] = field(default_factory=set)
    owes: bool = False
    stale: bool = False
    post_forward_group: dist.ProcessGroup | None = None
    places: list[int] = field(default_factory=list)
    name: str = ""
    _begun: bool = False  # a gather, since the last reshard
    _reducing: list[DtypeShard] = field(default_factory=list)
    _summing: list[_Summing] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module],
        params: Sequence[ShardedParam],
        place: Place,
        mixed: MixedDTypes,
        wires: UnitWires,
    ) -> Unit:
        """Return a unit with a shard per dtype, and others for params that have extensions."""
        unit = cls(tuple(modules), place, _dtype_shards_of(params, place, mixed, wires))
        unit.show_sharded()
        return unit

    @property
    def params(self) -> Iterable[ShardedParam]:
        return (param for dtype_shard in self.dtype_shards for param in dtype_shard.params)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all that modules may have registered: shares and unsharded parameters."""
        for param in self.params:
            yield param.sharded
            if param.unsharded is not None:
                yield param.unsharded

    def settings(self) -> dict[str, str]:
        """Return what ranks must agree on besides the parameters; `{}` in a name is the unit."""
        cuts = (f"{m.name!r} along dimension {m.shape.dim}" for m in self.params if m.shape.dim)
        kept = self.switches.reshard_to or self.switches.reshard_after_forward
        return {
            "what travels of unit {}": "; ".join(
                dtype_shard.travels_as() for dtype_shard in self.dtype_shards
            ),
            "the cut of unit {}": ", ".join(cuts) or "along dimension 0",
            "reshard_after_forward of unit {}": str(kept),
            "offload_policy of unit {}": "none" if self.place.offload is None else "to the CPU",
        }

    # --- parameters

    def connect(self, links: Links) -> None:
        for dtype_shard in self.dtype_shards:
            dtype_shard.connect(links)

    def sync_params(self) -> None:
        """Register parameters that a script has exchanged, or given an extension."""
        for dtype_shard in self.dtype_shards:
            dtype_shard.sync_params()
        for param in self.params:
            param.note_local()
        self._sort()
        self.show_sharded()

    def _sort(self) -> None:
        """Put every parameter into a dtype shard of its kind.

        Raises:
            RuntimeError: one was gathered as another kind.
        """
        strays = [m for s in self.dtype_shards for m in s.params if _kind_of(m) is not type(s)]
        if not strays:
            return
        if any(dtype_shard.begun for dtype_shard in self.dtype_shards):
            raise RuntimeError(_TOO_LATE.format(strays[0].name))
        before = self.dtype_shards
        self.dtype_shards = _dtype_shards_of(
            list(self.params), self.place, before[0].mixed, before[0].wires
        )
        if before[0].links is not None:
            self.connect(before[0].links)

    def refresh(self) -> None:
        """Free whole parameters, before a forward, that an optimizer has outdated.

        Those that stay are frozen or unfrozen as their shares are.
        """
        changed = any(param.is_changed() for param in self.params)
        if (self.stale or self.concealed or changed) and not self.running:
            self.reshard()
        if not self.running and any([param.is_exchanged() for param in self.params]):
            self.reshard()
            self.sync_params()
        if not self.is_unsharded:
            for dtype_shard in self.dtype_shards:
                dtype_shard.drop_part()
        if self.is_unsharded:
            for param in self.params:
                param.take_script_gradient()
                param.freeze_alike()
            self.watch()

    def start_gather(self) -> None:
        """Start to gather, unless the unit is whole or on the way. Collective."""
        if self.is_unsharded:
            return
        if not self._begun:
            self._begun = True
            for param in self.params:
                param.note_version()
        for dtype_shard in self.dtype_shards:
            if not isinstance(dtype_shard, ExtensionShard):
                _check_plain(dtype_shard)
            dtype_shard.start_gather()

    def finish_gather(self) -> None:
        """Wait until modules have the whole parameters."""
        if self.is_unsharded and not self.concealed:
            return
        if not self.is_unsharded:
            self.start_gather()
            for dtype_shard in self.dtype_shards:
                dtype_shard.finish_gather()
            for param in self.params:
                param.note_whole()
        for param in self.params:
            param.show_whole()
        self.is_unsharded, self.concealed = True, False
        self.watch()

    def watch(self) -> None:
        """Watch gradients of the unsharded parameters, and show them to hooks."""
        if self.gradients is not None:
            for param in self.params:
                param.watch(self.gradients)

    def watch_with(self, gradients: core.UnitGradients) -> None:
        """Let `gradients` watch this unit."""
        if self.gradients is not gradients:
            self.gradients = gradients
            for param in self.params:
                param.watched = None

    @property
    def trains(self) -> bool:
        """Return whether any of its parameters requires a gradient."""
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def stays(self) -> bool:
        """Return whether a script asked for unsharded parameters after a forward or backward."""
        after_forward = self.switches.reshard_after_forward or self.kept_by_default
        return not (after_forward and self.switches.reshard_after_backward)

    def lend_gradients(self) -> None:
        """Let a script that sees the unsharded parameters find the gradients there."""
        for param in self.params:
            param.lend_gradient()

    def take_script_gradients(self) -> None:
        """Give the shares the gradients that the script has set since."""
        for param in self.params:
            param.take_script_gradient()

    def take_set_gradients(self) -> None:
        """Give the shares also what a script has set where no backward has left gradients."""
        self.take_script_gradients()
        if self.accumulates:
            return
        for param in self.params:
            if param.unsharded is not None and param.unsharded.grad is not None:
                param.take_set_gradient()

    def conceal(self) -> None:
        """Show the shares to scripts, and keep the unsharded parameters for backward.

        Scripts may write to the shares until the next forward, which then gathers again.
        """
        if self.is_unsharded and not self.concealed:
            self.show_sharded()
            self.concealed = True

    def bytes_to_gather(self) -> int:
        """Return the bytes that every rank needs while this unit is whole."""
        return sum(dtype_shard.bytes_to_gather() for dtype_shard in self.dtype_shards)

    def bytes_to_reduce(self) -> int:
        """Return an upper bound on the bytes of gradients on their way, the same on every rank."""
        return sum(dtype_shard.bytes_to_reduce() for dtype_shard in self.dtype_shards)

    def freeze_alike(self) -> None:
        """Make shares and unsharded parameters require gradients alike."""
        for param in self.params:
            param.freeze_alike()

    def show_sharded(self) -> None:
        for param in self.params:
            param.show_sharded()

    def reshard(self, for_backward: bool = False) -> None:
        """Register the shares in the modules, and free the memory of the whole parameters.

        Args:
            for_backward: backward needs the parameters next, as they are now.
        """
        self.stale = False
        keeps = for_backward and self.switches.reshard_to is not None and self.is_unsharded
        post_forward_group = self.post_forward_group if keeps else None
        if self.is_unsharded:
            for param in self.params:
                param.check_whole()
            self.show_sharded()
            self.is_unsharded = self.concealed = False
        if self._begun:  # loading a state dict reshards once for each module
            self._begun = False
            for param in self.params:
                param.forget_version()
        for dtype_shard in self.dtype_shards:
            dtype_shard.release(post_forward_group)

    # --- gradients

    @property
    def in_flight(self) -> bool:
        return bool(self._reducing)

    def has_gradients(self) -> bool:
        """Return whether there is anything to reduce, or for replicas to add up."""
        if self.owes or any(dtype_shard.has_gradients() for dtype_shard in self.dtype_shards):
            return True
        return self.switches.all_reduce and any(s.partial is not None for s in self.dtype_shards)

    @property
    def accumulates(self) -> bool:
        """Return whether backwards have left gradients for a later one to reduce."""
        return self.owes or any(shard.partial is not None for shard in self.dtype_shards)

    def keep_gradients(self) -> None:
        """Leave them to a later backward."""
        self.owes = True
        for dtype_shard in self.dtype_shards:
            dtype_shard.keep_gradients()

    def start_reduce(self, scale: Number | None = None) -> None:
        """Send what has been accumulated. Collective.

        Args:
            scale: replaces the divisor.
        """
        self.owes = False
        if scale is None:
            scale = 1.0 / (self.switches.divisor or self.place.ranks)
        self._reducing = [
            dtype_shard for dtype_shard in self.dtype_shards if dtype_shard.start_reduce(scale)
        ]

    def finish_reduce(self) -> None:
        """Wait for the sums; replicas then start to all-reduce theirs, which is collective."""
        for dtype_shard in self._reducing:
            sums = dtype_shard.finish_reduce()
            if self.place.replicas is not None:
                self._add_up(dtype_shard, sums)
                continue
            self._call_hook(sums)
            dtype_shard.deliver(sums)
        self._reducing = []

    def _call_hook(self, sums: torch.Tensor) -> None:
        if self.switches.hook is None:
            return
        if self.switches.hook_stream is None:
            self.switches.hook(sums)
            return
        device, stream = torch.get_device_module(self.place.device), self.switches.hook_stream
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            self.switches.hook(sums)
        device.current_stream().wait_stream(stream)

    def _add_up(self, dtype_shard: DtypeShard, sums: torch.Tensor) -> None:
        if dtype_shard.partial is not None:
            sums.add_(dtype_shard.partial)
            dtype_shard.partial = None
        if not self.switches.all_reduce:
            dtype_shard.partial = sums
            return
        replicas, links, name = self.place.replicas, dtype_shard.links, dtype_shard.name
        assert replicas is not None and name is not None
        assert links is not None and links.replicas is not None
        sent = 2 * (replicas.size() - 1) * sums.nbytes // replicas.size()  # of a ring
        transfer = links.replicas.ranks.begin(name, "sum", sent)
        work = dist.all_reduce(sums, group=replicas, async_op=True)
        self._summing.append(_Summing(dtype_shard, sums, work, transfer))

    def finish_sums(self) -> None:
        """Wait for the all-reduce over the replicas."""
        for summing in self._summing:
            self._await(summing)
            self._call_hook(summing.sums)
            summing.dtype_shard.deliver(summing.sums)
            summing.transfer.arrived()
        self._summing = []

    def _await(self, summing: _Summing) -> None:
        assert self.place.replicas is not None
        wait_for(summing.work, summing.transfer, self.place.replicas)

    def forget(self) -> None:
        """Release everything that a failed step has left."""
        if self._reducing:
            for dtype_shard in self._reducing:
                dtype_shard.finish_reduce()
            self._reducing = []
        for summing in self._summing:
            self._await(summing)
        self._summing = []
        self.owes = False
        for dtype_shard in self.dtype_shards:
            dtype_shard.partial = None
            dtype_shard.arriving.clear()
        for param in self.params:
            param.take_whole_gradient()
        self.reshard()
        self.end_backward()
        self.places.clear()

    def end_backward(self) -> None:
        self.moment, self.expected, self.touched, self.running = Moment.IDLE, 0, False, 0
        self.busy.clear()


_TOO_LATE = (
    "parameter {!r} has got or lost fsdp_pre_all_gather() after it had been gathered; install "
    "extensions before the first forward"
)


def _kind_of(param: ShardedParam) -> type[DtypeShard]:
    if stands_apart(param.local):
        return ExtensionShard
    return DtypeShard if param.sharded.dtype in TRAINABLE else RawShard


def _dtype_shards_of(
    params: Sequence[ShardedParam], place: Place, mixed: MixedDTypes, wires: UnitWires
) -> list[DtypeShard]:
    """Return one dtype shard for each kind and dtype."""
    alike: dict[tuple[type[DtypeShard], torch.dtype], list[ShardedParam]] = {}
    for param in params:
        alike.setdefault((_kind_of(param), param.sharded.dtype), []).append(param)
    return [kind(its, place, mixed, wires) for (kind, _), its in alike.items()]


def _check_plain(dtype_shard: DtypeShard) -> None:
    for param in dtype_shard.params:
        if has_extension(param.local):
            raise RuntimeError(_TOO_LATE.format(param.name))
