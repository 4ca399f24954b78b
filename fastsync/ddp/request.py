"""Requests to FastDDP: checked, and agreed on by all ranks, before anything is built.

A rank with an error still takes part, so that the others do not wait for it; it raises that error
itself, from the report that they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fastsync._build.env import Env
from fastsync._torch import (
    default_group,
    has_python_reducer,
    is_dtensor,
    is_registered,
    local_part,
    mesh_groups,
)
from fastsync.config import compatibility
from fastsync.config.arguments import Zero
from fastsync.config.compatibility import Setup
from fastsync.config.fault_policies import PreemptionPolicy
from fastsync.config.param_groups import (
    Group,
    GroupKey,
    ParamGroup,
    check_parts,
    find_groups,
)
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.config.sync_modes import NO_GROUP
from fastsync.ddp.preemption_handler import check_preemption
from fastsync.faults import consensus
from fastsync.faults.node_links import check_grid, find_nodes
from fastsync.faults.rendezvous import UnreachableStoreError
from fastsync.reducer import core
from fastsync.reducer.buckets import travels_coded
from fastsync.reducer.monitor import gather_watched, lend_watch, open_watch, watched, wrapping
from fastsync.reducer.tied_parameters import check_untied
from fastsync.reducer.unused_parameters import NamedParam
from fastsync.timeline.recorder import TimelinePolicy
from fastsync.wire.formats import FORMATS, Wire
from fastsync.wire.plugins import check_device

T = TypeVar("T")
Settled = tuple[BucketPolicy, SyncPolicy, TimelinePolicy | None, PreemptionPolicy | None]


@dataclass(frozen=True)
class Request:
    """Arguments of a constructor; checked here before torch's front sees them."""

    module: nn.Module
    process_group: dist.ProcessGroup | None
    device_mesh: DeviceMesh | None
    device_ids: Sequence[int | torch.device] | None
    output_device: int | torch.device | None
    groups: Mapping[GroupKey, dist.ProcessGroup | Group] | None = None

    def settle(
        self,
        buckets: Callable[[], BucketPolicy],
        policy: Callable[[], SyncPolicy],
        timeline: Callable[[], TimelinePolicy | None],
        preemption: Callable[[], PreemptionPolicy | None],
    ) -> Settled:
        """Check the arguments and agree on them with all ranks."""

        def check() -> tuple[Settled, dict[str, str]]:
            self._check_module()
            caps, settled, recorded, saves = buckets(), policy(), timeline(), preemption()
            settled = replace(settled, groups=self._find_groups())
            check_preemption(saves, self._group())
            setup = Setup(
                settled,
                timeline=recorded is not None,
                device_mesh=self.device_mesh is not None,
                on_preemption=saves is not None,
                on_gpus=self._on_gpus(),
                dtensors=self._has_dtensors(),
            )
            self._check_fully_sharded()  # whose parameters are DTensors, which may not combine
            compatibility.check(setup)
            wire_settings = self._wire_settings(settled.wire)
            self._check_dtypes(settled)
            self._check_parts(settled)
            self._check_sync(settled)
            self._check_group(settled.wire, recorded)
            self._check_zero(settled.zero)
            if settled.zero.stage == 3:
                self._check_units()
            core.load({p.tensor.device for p in self._params() if p.tensor.requires_grad})
            settings = {
                "torch": torch.__version__,
                "the module's device": self._params()[0].tensor.device.type,
                "bucket_cap_mb": str([cap / (1 << 20) for cap in caps.caps]),
                **wire_settings,
                "gradient_as_bucket_view": str(settled.views),
                "find_unused_parameters=False": str(settled.fail_on_unused),
                "static_graph": str(settled.static_graph),
                "timeline": str(recorded),
                "mixed_precision": str(settled.mixed),
                "zero": settled.zero.describe(),
                "nonfinite": settled.nonfinite,
                "replicas": str(settled.replicas),
                "on_skip": settled.on_skip,
                "elastic": str(settled.elastic),
                "sync": settled.sync.describe() if settled.sync else "every step",
                "groups": "; ".join(group.describe() for group in settled.groups) or "none",
                "shared_memory": str(settled.wire.shared_memory),
                "on_preemption": str(saves and saves.signals),
            }
            return (caps, settled, recorded, saves), settings

        failure = "FastDDP cannot be built on every rank;"
        settled = self._together(check, failure, partial(open_watch, self._group()))
        with self.wrapping():
            self._probe(settled[1].wire)
            self._meet_groups(settled[1])
        return settled

    @property
    def placed(self) -> dict[str, Any]:
        """Return the arguments by which torch's front finds ranks and devices."""
        names = ("process_group", "device_mesh", "device_ids", "output_device")
        placed = {name: getattr(self, name) for name in names}
        if self._has_dtensors():  # of a mesh, the front replaces them by local tensors
            placed |= {"process_group": self._group(), "device_mesh": None}
        return placed

    def _has_dtensors(self) -> bool:
        return any(is_dtensor(param.tensor) for param in self._params())

    def wrapping(self) -> AbstractContextManager[None]:
        """Name ranks that end while the model is wrapped."""
        return wrapping(self._group())

    def settle_wire(self, policy: Callable[[], SyncPolicy], steps: int) -> SyncPolicy:
        """Settle another wire alone, after `steps` steps."""

        def check() -> tuple[SyncPolicy, dict[str, str]]:
            settled = policy()
            compatibility.check(Setup(settled, on_gpus=self._on_gpus()))
            self._check_group(settled.wire)
            return settled, {**self._wire_settings(settled.wire), "the number of steps": str(steps)}

        settled = self._together(check, "the wire cannot be changed on every rank;")
        self._probe(settled.wire)
        return settled

    def _together(
        self,
        check: Callable[[], tuple[T, dict[str, str]]],
        failure: str,
        meet: Callable[[str], object] = lambda obstacle: None,
    ) -> T:
        """Return what `check` returns, once its settings are known to be equal on all ranks.

        Args:
            failure: how the report of errors begins.
            meet: called before, with the reason why this rank cannot go on.
        """
        group = self._group()
        try:
            result, settings = check()
            error = None
        except Exception as own:
            error = own
        try:
            meet("" if error is None else str(error))
        except UnreachableStoreError as lost:
            error = lost if error is None else error
        if error is None:
            self._agree(group, settings, "", failure)
            return result
        try:
            self._agree(group, {}, str(error), failure)
        except consensus.RankMismatchError as report:
            raise error from report
        raise error

    def _wire_settings(self, wire: Wire) -> dict[str, str]:
        """Return the settings of `wire` that ranks must agree on.

        Raises:
            ValueError: `wire` does not suit the model or the ranks.
        """
        self._check_wire(wire)
        nodes = find_nodes(wire, self._group(), Env.read().local_ranks)
        grid = {"the hierarchical form's grid": nodes.describe()} if nodes else {}
        return {"wire": wire.describe(), **grid}

    def _probe(self, wire: Wire) -> None:
        """Check whether the backend can carry `wire`, and all ranks mean the same nodes.
        Collective.

        Raises:
            ValueError: on every rank.
        """
        group = self._group()
        if wire.plain or wire.form == "native" or group.size() == 1:
            return
        nodes = find_nodes(wire, group, Env.read().local_ranks)
        if nodes:
            check_grid(nodes, group)

        def check() -> tuple[None, dict[str, str]]:
            core.check_backend(group, self._device(), wire)
            return None, {}

        self._together(check, "gradients cannot travel as bytes on every rank;")

    def _find_groups(self) -> tuple[ParamGroup, ...]:
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return find_groups(self.groups or {}, self.module, self._group(), ignored)

    def _meet_groups(self, policy: SyncPolicy) -> None:
        """Check that ranks of a group mean the same group, and let them watch each other.
        Collective where there are groups.

        Raises:
            ValueError: on every rank.
        """
        whole = self._group()
        if not policy.groups or whole.size() == 1:
            return
        mine = [group.ranks for group in policy.groups]
        everyones = gather_watched(mine, whole, "the comparison of groups")
        ranks = dist.get_process_group_ranks(whole)
        labels = [group.label for group in policy.groups]
        check_parts(labels, dict(zip(ranks, everyones, strict=True)))
        for group in policy.groups:
            if group.process_group is not whole:
                lend_watch(group.process_group, whole)

    def _group(self) -> dist.ProcessGroup:
        if self.process_group is not None and self.device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if self.device_mesh is not None:
            if self.device_mesh.ndim != 1:
                raise RuntimeError(f"Only 1D device mesh is supported, but got {self.device_mesh}.")
            return self.device_mesh.get_group(mesh_dim=0)
        return self.process_group or default_group()

    def _params(self) -> list[NamedParam]:
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return named_params(self.module, ignored)

    def _on_gpus(self) -> bool:
        return any(p.tensor.device.type != "cpu" for p in self._params())

    def _check_group(self, wire: Wire, timeline: TimelinePolicy | None = None) -> None:
        """Check that a group made outside torch.distributed suits the request.

        Of such a group, only rank, size and collectives are known.

        Raises:
            ValueError: the request needs more.
        """
        group = self._group()
        if group.size() == 1 or is_registered(group):
            return
        if not (wire.plain or wire.form == "native"):
            raise ValueError(
                f"wire={wire.describe()!r} needs process groups beside this one, which "
                "torch.distributed can make only for groups that it made itself: use one of "
                "init_process_group() or new_group(), or a wire of form='native'"
            )
        if timeline is not None:
            raise ValueError(
                "timeline= brings the ranks together through the store of their process group, but "
                "torch.distributed did not make this one and knows no store of it; leave timeline "
                "out, or use a group of init_process_group() or new_group()"
            )

    def _check_zero(self, zero: Zero) -> None:
        group = self._group()
        if zero.stage and group.size() > 1 and not is_registered(group):
            raise ValueError(
                "zero needs a process group that torch.distributed made itself: use one of "
                "init_process_group() or new_group(), or zero=0"
            )
        if zero.stage:
            named = [(p.name, local_part(p.tensor)) for p in self._params()]
            named += [(f"buffer {n}", buffer) for n, buffer in self.module.named_buffers()]
            check_untied(named, "or use zero=0")
        if zero.parameter_wire is None:
            return
        dtypes = {p.tensor.dtype for p in self._params() if p.tensor.requires_grad}
        if not any(travels_coded(FORMATS[zero.parameter_wire], dtype) for dtype in dtypes):
            raise ValueError(
                f"parameter_wire={zero.parameter_wire!r} makes none of the parameters smaller, "
                f"which are {', '.join(sorted(map(str, dtypes)))}; leave it out, or choose a "
                "format of fewer bits"
            )

    def _check_sync(self, policy: SyncPolicy) -> None:
        ranks, mode, elastic = self._group().size(), policy.sync, policy.elastic
        if elastic is not None and elastic.patience is not None and mode is None:
            raise ValueError(
                f"elastic: patience={elastic.patience:g} leaves slow ranks out of averages of "
                "parameters, but gradients are averaged at every step; leave it out, or pass sync"
            )
        if mode is not None and mode.within in NO_GROUP:
            raise ValueError(
                "sync: within= is a group that this rank is not in; pass each rank its own group"
            )
        if mode is not None and ranks % mode.part_size:
            raise ValueError(
                f"sync: within={mode.part_size} needs groups of equal size, but there are {ranks} "
                "ranks; choose a number that divides it"
            )

    def _check_units(self) -> None:
        for param in self._params():
            if param.tensor.ndim == 0:
                raise ValueError(
                    f"zero=3 cuts parameters along their first dimension, and {param.name!r} has "
                    "none: make it one of a single element"
                )
            trained = param.tensor.is_complex() or param.tensor.requires_grad
            if param.sparse or (trained and not param.tensor.is_floating_point()):
                raise ValueError(
                    "zero=3 knows dense floating-point parameters and frozen integers, but "
                    f"{param.name!r} is {'sparse' if param.sparse else param.tensor.dtype}; use "
                    "zero=2"
                )

    def _check_dtypes(self, policy: SyncPolicy) -> None:
        if policy.mixed.reduce is None:
            return
        wide = [p.name for p in self._params() if p.tensor.dtype is torch.float64]
        if wide:
            raise ValueError(
                f"mixed_precision cannot reduce parameters of float64, as {wide[0]!r} is; convert "
                "the model to float32 before wrapping it"
            )

    def _check_fully_sharded(self) -> None:
        """Check that `fully_shard` reduces no gradients that FastDDP would wait for."""
        inside = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        sharded = {id(p) for module in inside for p in module.parameters() if is_dtensor(p)}
        for param in self._params():
            if id(param.tensor) in sharded:
                raise ValueError(
                    f"parameter {param.name!r} is a shard of FastDDP(zero=3) or fully_shard "
                    "already, and another FastDDP does not see its gradients: keep the wrapper "
                    "that there is. To average over replicas as well, pass fully_shard a mesh of "
                    "two dimensions, and leave FastDDP out"
                )

    def _check_parts(self, policy: SyncPolicy) -> None:
        """Check that ranks which average a DTensor have the same part of it."""
        if not self._has_dtensors():
            return
        whole = dist.get_process_group_ranks(self._group())
        ranks_of = {name: group.ranks for group in policy.groups for name in group.names}
        for param in self._params():
            average = ranks_of.get(param.name, whole)
            for group in mesh_groups(param.tensor, cut=True):
                parts = dist.get_process_group_ranks(group)
                if len(set(parts).intersection(average)) > 1:
                    raise ValueError(
                        f"parameter {param.name!r} is a DTensor of which ranks {parts} have "
                        f"different parts, but ranks {list(average)} would average them; pass the "
                        "ranks that have the same part as process_group, or in groups"
                    )

    def _check_module(self) -> None:
        if has_python_reducer():
            raise RuntimeError(
                "torch._dynamo.config.optimize_ddp is 'python_reducer', which puts code of torch's "
                "in place of FastDDP's engine; set it to 'ddp_optimizer' (the default), or use "
                "DistributedDataParallel"
            )
        params = [p.tensor for p in self._params()]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in params):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`, nor with FastDDP. Run a dummy forward pass to "
                "correctly initialize the modules"
            )
        if not any(p.requires_grad for p in params):
            raise RuntimeError(
                "FastDDP is not needed when a module doesn't have any parameter that requires a "
                "gradient. Unfreeze what you want to train before wrapping, or use the module as "
                "it is"
            )
        kinds = sorted({p.device.type for p in params})
        if len(kinds) != 1:
            raise ValueError(
                "FastDDP's input module must be on the same type of devices, but its parameters "
                f"are on {', '.join(kinds)}; move it with module.to(device) before wrapping it"
            )
        if self.device_ids is not None and len(self.device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        if kinds == ["cpu"] and (self.device_ids or self.output_device is not None):
            raise ValueError(
                "device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules, but device_ids is "
                f"{self.device_ids} and output_device {self.output_device}, and the module is on "
                "the CPU; leave both out, or move the module before wrapping it"
            )

    def _check_wire(self, wire: Wire) -> None:
        for param in self._params():
            codec = wire.codec_for(param.name)
            check_device(codec, param.name, param.tensor.device)
            if param.tensor.is_complex() and param.tensor.requires_grad and codec.name != "fp32":
                raise ValueError(
                    f"parameter {param.name!r} is {param.tensor.dtype}, which {codec.name} cannot "
                    "carry; keep it as it is with "
                    f"wire=fastsync.Wire({wire.describe()!r}, overrides={{{param.name!r}: 'fp32'}})"
                )

    def _device(self) -> torch.device:
        devices = [p.tensor.device for p in self._params()]
        return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))

    def _agree(
        self,
        group: dist.ProcessGroup,
        settings: dict[str, str],
        error: str,
        failure: str,
    ) -> None:
        params = [
            (p.name, tuple(p.tensor.shape), str(p.tensor.dtype), p.tensor.requires_grad)
            for p in self._params()
            if not isinstance(p.tensor, nn.parameter.UninitializedParameter)
        ]
        statement = consensus.Statement(settings, params, error)
        run = partial(watched, group, "the comparison of settings")
        consensus.agree(statement, group, self._device(), failure, run)


def named_params(module: nn.Module, ignored: Collection[str]) -> list[NamedParam]:
    """Return every parameter once, under its first name, frozen ones included."""
    sparse = {
        id(parameter)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
        for parameter in child.parameters(recurse=False)
    }
    return [
        NamedParam(name, parameter, id(parameter) in sparse)
        for name, parameter in module.named_parameters()
        if name not in ignored
    ]
