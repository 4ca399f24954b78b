"""The Python half of the engine: plans for the C++ reducer, agreed by all ranks.

Python decides before training and at the few forwards where a plan changes; in between the reducer
runs alone. `Engine` owns the reducer; FastDDP owns the engine.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fastsync.build import extension
from fastsync.build.env import Env
from fastsync.engine.agreement import PlanFacts, agree_on_plan
from fastsync.engine.state import Carried
from fastsync.plan.buckets import (
    BucketPlan,
    CodedPlan,
    ParamSpec,
    PlannedBucket,
    factor_shape,
    feeds_back,
    make_plan,
    settled_order,
)
from fastsync.plan.layout import FlatLayout, LowRankLayout, WireLayout
from fastsync.plan.policy import BucketPolicy, SyncPolicy
from fastsync.plan.topology import Network
from fastsync.ranks.links import Nodes, find_nodes, make_links
from fastsync.ranks.meeting import meet
from fastsync.torch_private import caller_level, resolvable_name
from fastsync.wire.formats import Format, TopK, Wire
from fastsync.wire.plugins import PluginCodec

__all__ = ["Engine", "NamedParam", "Progress"]

_NAMES_SHOWN = 10


@dataclass(frozen=True)
class NamedParam:
    """A parameter, its fully qualified name, and whether its gradient may be sparse."""

    name: str
    tensor: torch.Tensor
    sparse: bool = False


@dataclass(frozen=True)
class Progress:
    """Where a training is, as far as its buckets and schedules depend on it.

    Attributes:
        steps: synchronised steps so far.
        order: names of parameters, perhaps others than are trained now, in the order of the
            buckets.
        network: as this rank measured it, for bytes of gradients.
    """

    steps: int
    order: Sequence[str]
    network: Network


class Engine:
    """Buckets, plans and the C++ reducer of one wrapped module.

    Args:
        params: every parameter that may ever need a gradient, frozen ones included, in the same
            order on every rank.
        group: the process group whose ranks average their gradients.
        buckets: how large buckets may grow.
        policy: how gradients travel and where they live.

    Attributes:
        plan: the current plan; `plans`: every one so far.
        on_step: called with the C++ reducer before every step, at the same steps on all ranks.
    """

    def __init__(
        self,
        params: Sequence[NamedParam],
        group: dist.ProcessGroup,
        buckets: BucketPolicy,
        policy: SyncPolicy,
    ) -> None:
        self._ext = extension.load()
        self._params = list(params)
        self._group = group
        self._buckets = buckets
        self._policy = policy
        self._network = Network()  # as all ranks know it, for bytes of gradients
        self._measured_rate = 0.0  # by this rank, before a restart
        self._nodes = self._find_nodes()
        self._links: dict[Nodes | None, list[str]] = {}  # names of process groups
        self._linked: list[str] = []  # those that the reducer has
        self._identity = zlib.crc32("\n".join(p.name for p in params).encode())
        self._check_devices()
        tensors = [p.tensor for p in params]
        self.precision = (
            None if policy.mixed.param is None else self._ext.Precision(tensors, policy.mixed.param)
        )
        self.core = self._ext.Reducer(
            params=tensors,
            names=[p.name for p in params],
            group_name=resolvable_name(group),
            static_graph=policy.static_graph,
            fail_on_unused=policy.fail_on_unused,
            skip_unused=policy.skip_unused,
            precision=self.precision,
        )
        self._warming_up = False
        self.regrouped = False
        self._graphs: list[list[int]] = []  # what compiled graphs yield, each in planned order
        self.plan = BucketPlan(())
        self.plans: list[BucketPlan] = []
        self.on_step: Callable[[Any], None] | None = None
        # Autograd reaches the last registered layers first.
        order = [i for i in reversed(range(len(params))) if params[i].tensor.requires_grad]
        self._install(order)

    def _find_nodes(self) -> Nodes | None:
        return find_nodes(self._policy.wire, self._group, Env.read().local_ranks)

    def _check_devices(self) -> None:
        for device in {p.tensor.device for p in self._params if p.tensor.requires_grad}:
            if not self._ext.supports(str(device)):
                raise RuntimeError(
                    f"this build of fastsync has no kernels for {device}: install a CUDA toolkit "
                    "(nvcc) and delete the cached extension, or keep the model on the CPU"
                )

    @property
    def params(self) -> Sequence[NamedParam]:
        """Every parameter, in the order that indices refer to."""
        return self._params

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks average their gradients."""
        return self._group

    def before_forward(self) -> bool:
        """Prepares a forward that will be differentiated; returns whether the plan changed.

        Raises:
            RuntimeError: the previous backward was not finished, or left an error to report.
        """
        captured = self._is_captured()
        if self.on_step is not None and not captured:
            self.on_step(self.core)
        if self.precision is not None:
            self.precision.end_forward()  # where an earlier one was not followed by a backward
        advice = self.core.prepare_forward(captured)
        warmed_up = self._warming_up and not self._is_warming_up() and not captured
        if advice.unused and self._policy.warn_unused:
            self._warn_unused(advice.unused)
        if advice.replan:
            self._replan(advice.regrouped)
        elif warmed_up:
            self._install(self._order())
        return bool(advice.replan or warmed_up)

    def _is_captured(self) -> bool:
        """Whether this step becomes part of a CUDA graph."""
        on_gpu = any(p.tensor.is_cuda for p in self._params[:1])
        return on_gpu and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A forward, for which parameters are in the precision that they compute in."""
        if self.precision is None:
            yield
            return
        self.precision.begin_forward()
        try:
            yield
        finally:
            self.precision.end_forward()

    def after_forward(self, outputs: Iterable[torch.Tensor], sync: bool = True) -> None:
        """Makes the backward of `outputs` synchronise gradients, or only accumulate them."""
        self.core.prepare_backward([t for t in outputs if t.requires_grad], sync)

    def shadow_step(self) -> None:
        """Takes part in one step of the other ranks, without gradients of its own."""
        if self.on_step is not None:
            self.on_step(self.core)
        self.core.shadow_step()

    def graph_buckets(self, ready: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Where torch.compile shall split a graph, so that its pieces yield whole buckets.

        In the first step these are the buckets that the order of the graph's gradients will give,
        and the next plan follows them. Later they are those of the plan.

        Args:
            ready: the parameters in a graph, in the order of their gradients.

        Returns:
            The planned ones among them, grouped.
        """
        index_of = {id(param.tensor): index for index, param in enumerate(self._params)}
        order = [index_of[id(t)] for t in ready if id(t) in index_of]
        plan = self.plan
        if self.core.stats()["steps"] == 0:
            plan = self._plan(order)
            self._graphs.extend(list(bucket.params) for bucket in plan.buckets)
        known = set(order)
        groups = [[i for i in bucket.params if i in known] for bucket in plan.buckets]
        return [[self._params[i].tensor for i in group] for group in groups if group]

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Averages over another process group from now on."""
        self._group = group
        self.core.use_group(resolvable_name(group))
        self._nodes = self._find_nodes()
        self._links, self._linked = {}, []
        if self.plan.coded:
            self._install(self._order())

    @property
    def wire(self) -> Wire:
        """How gradients travel."""
        return self._policy.wire

    def set_wire(self, wire: Wire) -> None:
        """Has gradients travel as `wire` from the next step on, the same on every rank."""
        order = self._order()
        self._policy = replace(self._policy, wire=wire)
        self._nodes = self._find_nodes()
        self._install(order)
        stays = (self.feedback_shapes(), self.factor_shapes())
        self.core.drop_parked(
            *([i for i, p in enumerate(self._params) if p.name not in shapes] for shapes in stays)
        )

    def feedback_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters whose coding errors are fed back, frozen ones included."""
        specs = [self._param_spec(i, self.wire) for i in range(len(self._params))]
        pairs = zip(self._params, specs, strict=True)
        return {p.name: tuple(p.tensor.shape) for p, spec in pairs if feeds_back(spec, self.wire)}

    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what PowerSGD's next step starts with, by name, frozen parameters included."""
        specs = [self._param_spec(i, self.wire) for i in range(len(self._params))]
        found = zip(self._params, map(factor_shape, specs), strict=True)
        return {param.name: shape for param, shape in found if shape is not None}

    def carried(self) -> Carried:
        """What coding carries to the next step on this rank: copies."""
        return Carried.of(self.core, [param.name for param in self._params])

    def next_order(self) -> list[int]:
        """The order that the buckets of the next step will follow, as far as this rank knows."""
        ready = self.core.ready_order()
        if self._order_is_known or not ready:
            return self._order()
        return settled_order(ready, self._graphs)

    def measured(self) -> Network:
        """How fast this rank saw buckets travel in the first step of training.

        Unknown before, and where the user wants runs to repeat bit for bit: sums depend on how
        buckets are cut.
        """
        timed = not torch.are_deterministic_algorithms_enabled()
        rate = self._measured_rate or (float(self.core.wire_rate()) if timed else 0.0)
        return Network(rate, self._network.latency)

    def resume(self, progress: Progress, carried: Carried) -> None:
        """Goes on where a training was left. Collective: rank 0's order decides."""
        index_of = {param.name: index for index, param in enumerate(self._params)}
        self.core.resume(progress.steps)
        self._measured_rate, self._network = progress.network.rate, progress.network
        order = [index_of[name] for name in progress.order if name in index_of]
        trained, agreed = self._agreed(order)
        self._install([i for i in self._complete(agreed) if trained[i]])
        carried.load_into(self.core, {p.name: p.tensor.device for p in self._params})

    def _order(self) -> list[int]:
        return [index for bucket in self.plan.buckets for index in bucket.params]

    def _complete(self, order: Sequence[int]) -> list[int]:
        """`order`, then the parameters that it lacks."""
        seen = set(order)
        return [*order, *(i for i in reversed(range(len(self._params))) if i not in seen)]

    def set_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Has `hook` reduce the buckets from the next backward on, the same on every rank."""
        order = self._order()
        self._policy = replace(self._policy, hooked=True)
        self._install(order)
        self.core.set_hook(state, hook)

    def _plan(self, order: Sequence[int]) -> BucketPlan:
        wire = Wire() if self._is_warming_up() else self._policy.wire
        specs = [self._param_spec(i, wire) for i in order]
        world = dist.get_world_size(self._group)
        # Compiled graphs have been split where the first plan's buckets end.
        follows = self._buckets.adaptive and not self._graphs
        network = self._network if follows else Network()
        policy = replace(self._policy, wire=wire, network=network)
        buckets = self._buckets.on(network)
        node_ranks = len(self._nodes.node_ranks) if self._nodes else 1
        return make_plan(specs, order, buckets, policy, world, node_ranks)

    def _is_warming_up(self) -> bool:
        return bool(self.core.steps() < self._policy.wire.warmup_steps)

    def _install(self, order: Sequence[int]) -> None:
        """Makes a plan and hands it to the reducer. Collective where buckets are coded."""
        self._warming_up = self._is_warming_up()
        self.plan = self._plan(order)
        self._order_is_known = self.core.stats()["steps"] > 0
        if self.plan.coded and dist.get_world_size(self._group) > 1:
            self._make_chains()
        self.core.set_plan([self._spec(i, b) for i, b in enumerate(self.plan.buckets)])
        self.plans.append(self.plan)

    def _param_spec(self, index: int, wire: Wire) -> ParamSpec:
        param = self._params[index]
        return ParamSpec.of(index, param.tensor, param.sparse, wire.codec_for(param.name))

    def _make_chains(self) -> None:
        if self._nodes not in self._links:
            device = self._params[0].tensor.device
            links = make_links(self._group, self.wire, self._nodes, device)
            self._links[self._nodes] = [group.group_name for group in links]
        if self._linked != self._links[self._nodes]:
            self._linked = self._links[self._nodes]
            self.core.use_chains(self._linked)

    def _spec(self, index: int, bucket: PlannedBucket) -> Any:
        layout, plan = bucket.layout, bucket.coded
        coded = low_rank = None
        if plan is not None and isinstance(plan.layout, LowRankLayout):
            low_rank = self._low_rank_spec(index, layout, plan, plan.layout)
        elif plan is not None and isinstance(plan.layout, WireLayout):
            coded = self._coded_spec(index, plan, plan.layout)
        return self._ext.BucketSpec(
            slots=list(zip(bucket.params, layout.offsets, strict=True)),
            numel=layout.numel,
            flags_offset=layout.flags_offset,
            wire=bucket.wire,
            views=bucket.views,
            sparse=bucket.sparse,
            coded=coded,
            low_rank=low_rank,
        )

    def _coded_spec(self, index: int, coded: CodedPlan, layout: WireLayout) -> Any:
        wire = self._policy.wire
        spec = self._ext.CodedSpec()
        if isinstance(coded.codec, Format):
            spec.format = coded.codec.name
        elif isinstance(coded.codec, TopK):
            spec.kept = layout.coded_bytes // 8
        elif isinstance(coded.codec, PluginCodec):
            spec.use_plugin(coded.codec.address)
        else:
            spec.use_codec(coded.codec)
        for name in ("pieces", "chunk_numel", "chunk_bytes", "coded_bytes"):
            setattr(spec, name, getattr(layout, name))
        spec.flags_offset = layout.flags_offset
        spec.flags_per_chunk = layout.flags_per_chunk
        spec.gather = coded.form == "gather"
        if coded.node_ranks > 1 and self._nodes is not None:
            spec.node_ranks, spec.node_rank = len(self._nodes.node_ranks), self._nodes.place
            spec.nodes, spec.node = len(self._nodes.cross_ranks), self._nodes.node
        spec.error_feedback = coded.error_feedback
        spec.stochastic = wire.stochastic
        rank = self._group.rank()
        spec.seed = zlib.crc32(f"{wire.seed} {rank} {index}".encode())
        return spec

    def _low_rank_spec(
        self, index: int, slots: FlatLayout, coded: CodedPlan, layout: LowRankLayout
    ) -> Any:
        spec = self._ext.PowerSpec()
        for matrix in layout.matrices:
            spec.add_matrix(
                offset=slots.offsets[matrix.slot],
                sizes=(matrix.rows, matrix.cols),
                rank=matrix.rank,
                places=(matrix.left, matrix.right),
            )
        for slot, place in layout.places:
            spec.add_run(offset=slots.offsets[slot], numel=slots.numels[slot], place=place)
        spec.numel = slots.numel
        for name in ("first_numel", "second_numel", "flags_offset", "flags"):
            setattr(spec, name, getattr(layout, name))
        spec.error_feedback = coded.error_feedback
        spec.warm_start = coded.codec.warm_start
        spec.seed = zlib.crc32(f"{self._policy.wire.seed} {index}".encode())
        return spec

    def _replan(self, regrouped: bool) -> None:
        """Collective. Rank 0's ready order decides; a parameter that any rank trains is planned."""
        if regrouped:
            place = f"plan-{self._identity}-{self.core.stats()['plans']}"
            count = sum(p.tensor.requires_grad for p in self._params)
            reason = f"the others to train the same parameters ({count} on this rank)"
            meet(self._group, place, reason, Env.read().agree_timeout)
        ready = settled_order(self.core.ready_order(), self._graphs)
        trained, order = self._agreed(ready)
        before = self.plan
        self._install([i for i in self._complete(order) if trained[i]])
        self.regrouped = self.regrouped or self.plan != before

    def _agreed(self, ready: Sequence[int]) -> tuple[list[bool], list[int]]:
        """What any rank trains, and rank 0's `ready`; all ranks come to know the same network."""
        mine = PlanFacts(self.core.trainable(), ready, self.measured())
        agreed = agree_on_plan(mine, self._group, self._params[0].tensor.device)
        self._network = agreed.network
        return list(agreed.trained), list(agreed.order)

    def _warn_unused(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        warnings.warn(
            f"rank {self._group.rank()}: {len(names)} parameters got no gradient in the "
            f"last backward: {shown}{more}. fastsync handles this; gradients that no rank produced "
            "stay untouched. Pass find_unused_parameters=False to make it an error, or True to "
            "silence this warning",
            stacklevel=caller_level(),
        )
