"""The Python half of the engine: plans for the C++ reducer, agreed by all ranks.

Python decides before training and at the few forwards where a plan changes; in between the reducer
runs alone. `Engine` owns the reducer; FastDDP owns the engine.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fastsync.build.env import Env
from fastsync.engine import core
from fastsync.engine.agreement import PlanFacts, agree_on_plan
from fastsync.engine.memory import share_memory
from fastsync.engine.shares import ShardedUnit, Shares
from fastsync.engine.state import Carried
from fastsync.engine.unused import NamedParam, UnusedParams
from fastsync.engine.watch import open_watch, watch_of
from fastsync.plan.buckets import (
    BucketPlan,
    ParamSpec,
    factor_shape,
    feeds_back,
    make_plan,
    settled_order,
)
from fastsync.plan.policy import BucketPolicy, SyncPolicy
from fastsync.plan.topology import Network
from fastsync.ranks.links import Nodes, find_nodes, make_links, new_cpu_group
from fastsync.ranks.meeting import MeetingPlace
from fastsync.torch_private import is_registered, resolvable_name, without_modes
from fastsync.wire.formats import Wire

__all__ = ["Engine", "NamedParam", "Progress", "ShardedUnit"]


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
        policy: how gradients travel, now.
        shares: what of them the ranks share.
        on_step: called with the C++ reducer before every step, at the same steps on all ranks.
        unused: what is said of parameters without gradient.
        regrouped: a plan of this training replaced another one with different buckets.
    """

    def __init__(
        self,
        params: Sequence[NamedParam],
        group: dist.ProcessGroup,
        buckets: BucketPolicy,
        policy: SyncPolicy,
    ) -> None:
        self._params = list(params)
        self._group = group
        self.policy = policy
        self._network = Network()  # as all ranks know it, for bytes of gradients
        self._measured_rate = 0.0  # by this rank, before a restart
        self._nodes = self._find_nodes()
        self._links: dict[Nodes | None, list[str]] = {}  # names of process groups
        self._linked: list[str] = []  # those that the reducer has
        self._node_memory: dict[Nodes, core.SharedMemory | None] = {}
        self._own_group: dist.ProcessGroup | None = None  # for used flags beside a hook
        self._meeting = self._meeting_place()
        self._recent: dict[tuple[int, ...], int] = {}  # numbers of plans, by what was trained
        self._check_devices()
        tensors = [p.tensor for p in params]
        compute = policy.mixed.param
        self.precision = None if compute is None else core.make_precision(tensors, compute)
        names = [p.name for p in params]
        self.core = core.make_reducer(tensors, names, group, policy, self.precision)
        self.core.use_watch(watch_of(group))
        self._memory = self._share_memory(group)
        self.core.use_memory(self._memory)
        self._buckets = buckets.in_memory() if self._memory and policy.zero.stage else buckets
        self.shares = Shares(self.core, group, tensors[0].device, self._memory)
        self.regrouped = False
        self._plan_changed = False
        self._graphs: list[list[int]] = []  # what compiled graphs yield, each in planned order
        self.plan = BucketPlan(())
        self.plans: list[BucketPlan] = []
        self.unused = UnusedParams(self._params, group, policy.warn_unused)
        self.on_step: Callable[[core.Reducer], None] | None = None
        me = weakref.ref(self)
        self.core.on_plan_due(lambda: _replan(me))
        # Autograd reaches the last registered layers first.
        order = [i for i in reversed(range(len(params))) if params[i].tensor.requires_grad]
        self._install(order)

    def _share_memory(self, group: dist.ProcessGroup) -> core.SharedMemory | None:
        """Memory of the ranks of `group`, where they are on one machine. Collective."""
        if not self.policy.in_memory or any(p.tensor.device.type != "cpu" for p in self._params):
            return None
        return share_memory(group, sum(p.tensor.nbytes for p in self._params))

    def _find_nodes(self) -> Nodes | None:
        return find_nodes(self.policy.wire, self._group, Env.read().local_ranks)

    def _check_devices(self) -> None:
        for device in {p.tensor.device for p in self._params if p.tensor.requires_grad}:
            if not core.supports(device):
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
        """Prepares a forward whose backward will synchronise.

        Returns:
            Whether there is another plan than before the last one.

        Raises:
            RuntimeError: the previous backward was not finished, or left an error to report.
        """
        captured = self._is_captured()
        if self.on_step is not None and not captured:
            self.on_step(self.core)
        if self.precision is not None:
            self.precision.end_forward()  # where an earlier one was not followed by a backward
        with self.unused.naming_replaced():
            advice = self.core.prepare_forward(captured)
        if advice.unused:
            self.unused.look_at(advice.unused)
        if advice.regrouped:
            self._regroup()
        changed, self._plan_changed = self._plan_changed, False
        return changed

    def before_local_forward(self) -> None:
        """Prepares a forward whose backward will only accumulate; ranks may differ in their number.

        Raises:
            RuntimeError: the previous backward was not finished, or left an error to report.
        """
        if self.precision is not None:
            self.precision.end_forward()
        with self.unused.naming_replaced():
            self.core.prepare_local_forward()

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
        open_watch(group)
        self.core.use_watch(watch_of(group))
        self._memory = self._share_memory(group)
        self.core.use_memory(self._memory)
        self._nodes = self._find_nodes()
        self._links, self._linked, self._own_group = {}, [], None
        self._meeting = self._meeting_place()
        self._forget_plans()
        self._install(self._order())

    def shard(self, units: Sequence[ShardedUnit]) -> None:
        """Has the ranks share the gradients of these units, and no others. Collective.

        Every rank calls it between the same two steps.
        """
        self.shares.take(units)
        self._forget_plans()
        self._install(self._order())

    @property
    def wire(self) -> Wire:
        """How gradients travel."""
        return self.policy.wire

    def set_wire(self, wire: Wire) -> None:
        """Has gradients travel as `wire` from the next step on, the same on every rank."""
        order = self._order()
        self.policy = replace(self.policy, wire=wire)
        self._forget_plans()
        self._nodes = self._find_nodes()
        self._install(order)
        for name, shapes in self.state_shapes().items():
            gone = [i for i, p in enumerate(self._params) if p.name not in shapes]
            self.core.drop_parked(name, gone)

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of what parameters carry, by the name of the state and of the parameter."""
        return {"residual": self.feedback_shapes(), "factor": self.factor_shapes()}

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
        rate = self._measured_rate or (self.core.wire_rate() if timed else 0.0)
        return Network(rate, self._network.latency)

    def resume(self, progress: Progress, carried: Carried) -> None:
        """Resumes where a training was left. Collective: rank 0's order decides."""
        index_of = {param.name: index for index, param in enumerate(self._params)}
        self.core.resume(progress.steps)
        self._forget_plans()
        self._measured_rate, self._network = progress.network.rate, progress.network
        order = [index_of[name] for name in progress.order if name in index_of]
        trained, agreed = self._agreed(order)
        self._install([i for i in self._complete(agreed) if trained[i]])
        carried.load_into(self.core, {p.name: p.tensor.device for p in self._params})

    def _order(self) -> list[int]:
        """The plan's, then parameters that have been thawed since it was made."""
        planned = [index for bucket in self.plan.buckets for index in bucket.params]
        later = set(planned)
        trained = (i for i, p in enumerate(self._params) if p.tensor.requires_grad)
        return [*planned, *(i for i in trained if i not in later)]

    def _complete(self, order: Sequence[int]) -> list[int]:
        """`order`, then the parameters that it lacks."""
        seen = set(order)
        return [*order, *(i for i in reversed(range(len(self._params))) if i not in seen)]

    def set_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Has `hook` reduce the buckets from the next backward on, the same on every rank."""
        order = self._order()
        self.policy = replace(self.policy, hooked=True)
        self._forget_plans()
        self.core.set_hook(state, hook, self._flags_group())
        self._install(order)

    def _flags_group(self) -> str:
        """Collective. The name of a process group for used flags; empty where none is needed."""
        told = self.policy.static_graph or self.policy.fail_on_unused
        alone = self._group.size() == 1
        if told or alone or self._memory is not None or self._params[0].tensor.device.type != "cpu":
            return ""
        if not is_registered(self._group):  # torch makes no groups like it
            return ""
        if self._own_group is None:
            self._own_group = new_cpu_group(self._group, "used flags")
        return str(self._own_group.group_name)

    def _plan(self, order: Sequence[int]) -> BucketPlan:
        wire = Wire() if self._is_warming_up() else self.policy.wire
        specs = [self._param_spec(i, wire) for i in order]
        world = self._group.size()
        # Compiled graphs have been split where the first plan's buckets end.
        follows = self._buckets.adaptive and not self._graphs
        network = self._network if follows else Network()
        policy = replace(self.policy, wire=wire, network=network)
        buckets = self._buckets.on(network)
        node_ranks = len(self._nodes.node_ranks) if self._nodes else 1
        return make_plan(specs, order, buckets, policy, world, node_ranks)

    def _is_warming_up(self) -> bool:
        return self.core.steps() < self.policy.wire.warmup_steps

    def _install(self, order: Sequence[int], keep: bool = False) -> None:
        """Makes a plan and hands it to the reducer. Collective where chains carry buckets.

        Args:
            keep: the plan that it replaces will be wanted again.
        """
        until = self.policy.wire.warmup_steps if self._is_warming_up() else -1
        self.plan = self._plan(order)
        self._order_is_known = self.core.stats()["steps"] > 0
        if self.plan.chained and self._group.size() > 1:
            self._make_chains()
        gradients, owners = self.shares.gradients, self.shares.owners(self._nodes)
        sender = core.Sender(self.wire, self._group.rank(), self._nodes, gradients, owners)
        specs = [core.bucket_spec(i, b, sender) for i, b in enumerate(self.plan.buckets)]
        self.core.set_plan(specs, until, keep)
        self.plans.append(self.plan)
        self._recent[self._trained()] = len(self.plans)

    def _param_spec(self, index: int, wire: Wire) -> ParamSpec:
        param = self._params[index]
        spec = ParamSpec.of(index, param.tensor, param.sparse, wire.codec_for(param.name))
        shard = self.shares.place(index) if self.policy.shardable else None
        return replace(spec, shard=shard)

    def _make_chains(self) -> None:
        if self._nodes not in self._links:
            device = self._params[0].tensor.device
            links = make_links(self._group, self.wire, self._nodes, device)
            self._links[self._nodes] = [group.group_name for group in links]
            if self._nodes is not None:
                self._node_memory[self._nodes] = self._share_memory(links[0])
        if self._linked != self._links[self._nodes]:
            self._linked = self._links[self._nodes]
            memory = self._node_memory.get(self._nodes) if self._nodes is not None else None
            self.core.use_chains(self._linked, memory)

    def _regroup(self) -> None:
        """Collective. Others are trained than are planned: takes a recent plan or a new one."""
        trained = self._trained()
        number = self._recent.get(trained, 0)
        known = number if self.core.keeps_plan(number) else 0
        reason = f"the others to train the same parameters ({len(trained)} on this rank)"
        alike = self._meeting.meet(reason, f"plan {known}")
        if not (known and alike):
            self._replan(keep=True)
            return
        self.core.restore_plan(known)
        self.plan, self._plan_changed = self.plans[known - 1], True

    def _trained(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self._params) if p.tensor.requires_grad)

    def _meeting_place(self) -> MeetingPlace:
        identity = zlib.crc32("\n".join(p.name for p in self._params).encode())
        return MeetingPlace(self._group, f"plan-{identity}", Env.read().agree_timeout)

    def _forget_plans(self) -> None:
        self._recent.clear()
        self.core.forget_plans()

    def _replan(self, keep: bool = False) -> None:
        """Collective. Rank 0's ready order decides; a parameter that any rank trains is planned."""
        ready = settled_order(self.core.ready_order(), self._graphs)
        trained, order = self._agreed(ready)
        before = self.plan
        self._install([i for i in self._complete(order) if trained[i]], keep)
        self.regrouped = self.regrouped or self.plan != before
        self._plan_changed = True

    def _agreed(self, ready: Sequence[int]) -> tuple[list[bool], list[int]]:
        """What any rank trains, and rank 0's `ready`; all ranks come to know the same network."""
        mine = PlanFacts(self.core.trainable(), ready, self.measured())
        agreed = agree_on_plan(mine, self._group, self._params[0].tensor.device)
        self._network = agreed.network
        return list(agreed.trained), list(agreed.order)


def _replan(engine: weakref.ref[Engine]) -> None:
    """What the reducer calls; it must not keep its engine alive."""
    alive = engine()
    if alive is None:
        return
    with without_modes():  # those of the backward that has just ended
        alive._replan()
