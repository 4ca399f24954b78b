"""The Python half of the engine: plans for the C++ reducer, agreed by all ranks.

Python decides before training and at the few forwards where a plan changes; in between the reducer
runs alone. `Engine` owns the reducer; FastDDP owns the engine.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist

from fastsync._build.env import Env
from fastsync._torch import (
    backward_is_running,
    even_numel,
    is_dtensor,
    resolvable_name,
    without_modes,
)
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.config.topology import Network
from fastsync.faults.rendezvous import Rendezvous
from fastsync.reducer import core
from fastsync.reducer.agreement import PlanFacts, agree_on_plan
from fastsync.reducer.buckets import (
    BucketPlan,
    ParamSpec,
    feeds_back,
    make_plan,
    settled_order,
)
from fastsync.reducer.gradient_shards import GradientShards, ShardedUnit
from fastsync.reducer.group_means import GroupMeans
from fastsync.reducer.local_gradients import LocalGradients
from fastsync.reducer.mean_weights import MeanWeights
from fastsync.reducer.monitor import make_rendezvous, numbers_in_watch, open_watch, watch_of
from fastsync.reducer.routes import Routes
from fastsync.reducer.step_timing import StepTimingWatch
from fastsync.reducer.unused_parameters import NamedParam, UnusedParams
from fastsync.reducer.weak_calls import weakly
from fastsync.wire.formats import Wire


@dataclass(frozen=True)
class Progress:
    """Progress of a training, as far as its buckets and schedules depend on it.

    Attributes:
        steps: synchronised steps so far.
        order: names of parameters, perhaps others than are trained now, in the order of the
            buckets.
        network: as this rank measured it, for bytes of gradients.
    """

    steps: int
    order: Sequence[str]
    network: Network


@cache
def engines() -> weakref.WeakSet[Engine]:
    """Return the engines of this process; a parameter may belong to several."""
    return weakref.WeakSet()


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
        network: as all ranks know it, for bytes of gradients.
        graphs: what compiled graphs yield, each in planned order.
        policy: how gradients travel, now.
        shares: what of them the ranks share.
        routes: what gradients travel over beside the process group.
        group_routes: the same for each of `policy.groups`.
        on_step: called with the C++ reducer before every step, at the same steps on all ranks.
        unused: what is said of parameters without gradient.
        step_timing: which ranks the others wait for.
        forwards: those so far whose backward is to synchronise.
        regrouped: a plan of this training replaced another one with different buckets.
        during: runs what all ranks do together between steps.
        weights: those of the micro-batches; None: the script has given none.
        locals: of DTensors.
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
        self.network = Network()
        self._measured_rate = 0.0  # by this rank, before a restart
        self._rendezvous = self._make_rendezvous()
        self._recent: dict[tuple[int, ...], int] = {}  # numbers of plans, by what was trained
        leaves = [p.tensor for p in params]
        self.locals = LocalGradients(leaves)
        self._tensors = tensors = self.locals.tensors
        compute = policy.mixed.param
        self.precision = None if compute is None else core.Precision(tensors, compute)
        names = [p.name for p in params]
        self.core = core.make_reducer(tensors, leaves, names, group, policy, self.precision)
        self.core.use_watch(watch_of(group), numbers_in_watch(group))
        self.routes = Routes(self.core, self._params)
        self.routes.use_group(group, policy)
        self._group_of = {
            name: number for number, of in enumerate(policy.groups, start=1) for name in of.names
        }
        self.group_routes = [self._make_group(n) for n in range(1, len(policy.groups) + 1)]
        memory = self.routes.memory
        shares = memory and policy.zero.stage > 0 and policy.elastic is None
        self._buckets = buckets.in_memory(policy.zero.master_weights) if shares else buckets
        self.shares = GradientShards(self.core, group, tensors[0].device, memory)
        self.regrouped = False
        self._plan_changed = self._follows = False
        self.forwards = 0
        self.graphs: list[list[int]] = []
        self.plan = BucketPlan(())
        self.plans: list[BucketPlan] = []
        self.unused = UnusedParams(self._params, group, policy.warn_unused)
        self.step_timing = StepTimingWatch(self.core, group)
        self.on_step: Callable[[core.Reducer], None] | None = None
        self.during: Callable[[Callable[[], None]], None] = lambda task: task()
        self.weights: MeanWeights | None = None
        self._divisor = float(group.size())
        self._group_means = self._make_group_means(leaves)
        self._watch_backwards()
        self.core.on_plan_due(weakly(self._end_step))
        # Autograd reaches the last registered layers first.
        order = [i for i in reversed(range(len(params))) if params[i].tensor.requires_grad]
        self._install(order)
        engines().add(self)

    def _make_group(self, number: int) -> Routes:
        """Have the reducer average over another group. Collective."""
        its = self.policy.groups[number - 1]
        self.core.add_group(resolvable_name(its.process_group), its.divisor)
        params = [param for param in self._params if param.name in its.names]
        routes = Routes(self.core, params, number)
        routes.use_group(its.process_group, self.policy)
        return routes

    def _make_group_means(self, leaves: Sequence[torch.Tensor]) -> GroupMeans | None:
        parts = {}
        for index, param in enumerate(self._params):
            if number := self.group_of(param):
                its = self.policy.groups[number - 1]
                if its.divisor != len(its.ranks):
                    parts[index] = its.divisor / len(its.ranks)
        return GroupMeans(leaves, parts) if parts else None

    def group_of(self, param: NamedParam) -> int:
        """Return which of `policy.groups` averages a parameter, from 1 on; 0: all ranks do."""
        return self._group_of.get(param.name, 0)

    def _ranks_of(self, param: NamedParam) -> int:
        """Return how many ranks average a parameter."""
        number = self.group_of(param)
        return len(self.policy.groups[number - 1].ranks) if number else self._group.size()

    @property
    def params(self) -> Sequence[NamedParam]:
        """Return every parameter, in the order that indices refer to."""
        return self._params

    @property
    def local_params(self) -> list[NamedParam]:
        """Return the parameters with local tensors in place of DTensors."""
        pairs = zip(self._params, self._tensors, strict=True)
        return [replace(param, tensor=tensor) for param, tensor in pairs]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks average their gradients."""
        return self._group

    def before_forward(self) -> bool:
        """Prepare a forward whose backward will synchronise.

        Returns:
            Whether there is another plan than before the last one.

        Raises:
            RuntimeError: the previous backward was not finished, or left an error to report.
        """
        self.forwards += 1
        captured = self._is_captured()
        if captured and self.policy.uncapturable:
            reason = self.policy.uncapturable
            raise RuntimeError(f"a step that is captured into a CUDA graph {reason}")
        if captured and self.weights is not None:
            raise RuntimeError(
                "a step that is captured into a CUDA graph cannot have weights: a replay would "
                "repeat those of the captured step"
            )
        if not captured:
            self._begin_step()
        if self.precision is not None:
            self.precision.end_forward()  # where an earlier one was not followed by a backward
        self._follow_advice(lambda: self.core.prepare_forward(captured))
        changed, self._plan_changed = self._plan_changed, False
        return changed

    def announce_backward(self) -> None:
        """Make the next backward synchronise, whichever forward it belongs to.

        Parameters may have been frozen or unfrozen since the last forward, on every rank alike.

        Raises:
            RuntimeError: the previous backward was not finished, or left an error to report.
        """
        self._follow_advice(self.core.announce_backward)

    def _follow_advice(self, prepare: Callable[[], core.ForwardAdvice]) -> None:
        """Do what the reducer asks for before a step."""
        with self.unused.naming_replaced():
            advice = prepare()
        if advice.unused:
            self.unused.look_at(advice.unused)
        if advice.new_timing:
            self.step_timing.warn()
        if advice.regrouped:
            if self.precision is not None:
                self.precision.end_forward()  # plans depend on what parameters are stored in
            self.during(self._regroup)

    def _begin_step(self) -> None:
        if self.on_step is not None and not backward_is_running():
            self.on_step(self.core)

    def before_local_forward(self, begins: bool = False) -> bool:
        """Prepare a forward whose backward will only accumulate; ranks may differ in their number.

        Args:
            begins: it begins a step of all ranks, each with its own gradients.

        Returns:
            False: the plan stays.

        Raises:
            RuntimeError: the previous backward was not finished, or left an error to report.
        """
        if begins:
            self._begin_step()
        if self.precision is not None:
            self.precision.end_forward()
        with self.unused.naming_replaced():
            self.core.prepare_local_forward()
        return False

    def _is_captured(self) -> bool:
        """Return whether this step becomes part of a CUDA graph."""
        on_gpu = any(p.tensor.is_cuda for p in self._params[:1])
        return on_gpu and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run a forward with parameters in the precision that they compute in."""
        if self.precision is None or self.core.recomputes():
            yield  # within a backward parameters are in that precision
            return
        self.precision.begin_forward()
        try:
            yield
        finally:
            self.precision.end_forward()

    def after_forward(self, outputs: Iterable[torch.Tensor], sync: bool = True) -> None:
        """Make the backward of `outputs` synchronise gradients, or only accumulate them."""
        self.core.prepare_backward([t for t in outputs if t.requires_grad], sync)

    def shadow_step(self) -> None:
        """Take part in one step of the other ranks, without gradients of its own."""
        if self.on_step is not None:
            self.on_step(self.core)
        if self.weights is not None and self.plan.buckets:  # without any, no rank makes a step
            self.weights.shadow()
        self.core.shadow_step()

    def set_divisor(self, divisor: float) -> None:
        """Divide sums of gradients without weights by another number than that of the ranks."""
        self._divisor = divisor
        self.core.set_divisor(divisor)

    def use_weights(
        self,
        averages: Callable[[], Sequence[torch.Tensor | None]],
        apart: Callable[[int], bool],
    ) -> MeanWeights:
        """Return what weights are given to; from now on they scale the gradients.

        Args:
            averages: as of `MeanWeights`.
            apart: whether autograd adds to something else than the average of a parameter.
        """
        ranks = [self._ranks_of(param) for param in self._params]
        device = self._params[0].tensor.device
        copies = partial(_copies, apart, ranks)
        weights = MeanWeights(self._group, str(self._identity()), device, averages, copies)
        begin = partial(weakly(self._begin_weighted), weights)
        self._watch_backwards(begin, partial(weakly(self._start_weighted), weights), weights.scale)
        self.weights = weights
        return weights

    def _begin_weighted(self, weights: MeanWeights, accumulated: bool) -> list[int]:
        if self.plan.buckets:
            return weights.begin_backward(accumulated)
        weights.drop()
        return []

    def _start_weighted(self, weights: MeanWeights, backwards: int) -> list[int]:
        if self.policy.hooked:
            weights.start(backwards, 1.0, float(self._group.size()))
        else:
            weights.start(backwards, 1.0 / self._divisor)
        self.core.at_end(weights.note_mean)
        return []

    def _watch_backwards(
        self,
        begin: Callable[[bool], list[int]] | None = None,
        start: Callable[[int], list[int]] | None = None,
        scale: Callable[[], float | torch.Tensor] | None = None,
    ) -> None:
        """Let the reducer call these, as `MeanWeights` says, around what groups and DTensors
        need.
        """
        if self._group_means is not None:
            start = partial(weakly(self._start_in_groups), self._group_means, start)
        if any(is_dtensor(param.tensor) for param in self._params):
            start = partial(weakly(self._start_locally), self.locals, start)
        self.core.use_weights(begin, start, scale)

    def _start_in_groups(
        self, means: GroupMeans, start: Callable[[int], list[int]] | None, backwards: int
    ) -> list[int]:
        if start is not None:
            start(backwards)
        planned = self.plan.params
        self.core.at_end(partial(self._note_group_means, means, planned))
        if self.policy.skip_unused or self.policy.fail_on_unused:
            return []  # all ranks use the same ones, whose hooks take them; the rest stays unused
        return means.start(planned)

    def _note_group_means(self, means: GroupMeans, planned: Sequence[int]) -> None:
        if self.weights is None or not self.weights.has_mean:  # whose parts it takes itself
            means.note(planned)

    def _start_locally(
        self, its: LocalGradients, start: Callable[[int], list[int]] | None, backwards: int
    ) -> list[int]:
        its.begin()
        self.core.at_end(its.finish)  # before what `start` has called at the end
        return [] if start is None else start(backwards)

    def graph_buckets(self, ready: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the groups of parameters at which torch.compile splits a graph, one for each
        bucket.

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
            self.graphs.extend(list(bucket.params) for bucket in plan.buckets)
        known = set(order)
        groups = [[i for i in bucket.params if i in known] for bucket in plan.buckets]
        return [[self._params[i].tensor for i in group] for group in groups if group]

    def use_group(self, group: dist.ProcessGroup, agreed: bool = True) -> None:
        """Average over another process group from now on. Collective.

        Args:
            agreed: all ranks have the same plan now.
        """
        self._group = group
        self.step_timing = StepTimingWatch(self.core, group)
        if self.weights is not None:
            self.weights.divides = None
        self.weights = None
        self._watch_backwards()
        self._divisor = float(group.size())
        self.core.use_group(resolvable_name(group))
        open_watch(group)
        self.core.use_watch(watch_of(group), numbers_in_watch(group))
        self.routes.use_group(group, self.policy)
        device = self._params[0].tensor.device
        self.shares = GradientShards(self.core, group, device, self.routes.memory)
        self._rendezvous = self._make_rendezvous()
        self._forget_plans()
        if agreed:
            self._install(self._order())
        else:
            self._follow(self._order())

    def shard(self, units: Sequence[ShardedUnit]) -> None:
        """Make the ranks share the gradients of these units, and of no others. Collective.

        Every rank calls it between the same two steps.
        """
        self.shares.take(units)
        self._forget_plans()
        self._install(self._order())

    @property
    def wire(self) -> Wire:
        """Return the wire format of the gradients."""
        return self.policy.wire

    def set_wire(self, wire: Wire) -> None:
        """Send gradients as `wire` from the next step on; the same on every rank."""
        order = self._order()
        self.policy = replace(self.policy, wire=wire)
        self._forget_plans()
        self.routes.find_nodes(wire)
        self._install(order)
        shapes = self.residual_shapes()
        self.core.drop_parked([i for i, p in enumerate(self._params) if p.name not in shapes])

    def residual_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters whose coding errors are fed back, frozen ones included."""
        specs = [self._param_spec(i, self.wire) for i in range(len(self._params))]
        pairs = zip(self._params, specs, strict=True)
        shapes = [tuple(tensor.shape) for tensor in self._tensors]
        return {p.name: shapes[s.index] for p, s in pairs if feeds_back(s, self.wire)}

    def residuals(self) -> dict[str, torch.Tensor]:
        """Copies of what error feedback keeps back on this rank, by parameter name."""
        pairs = zip(self._params, self.core.residuals(), strict=True)
        return {param.name: held for param, held in pairs if held is not None}

    def next_order(self) -> list[int]:
        """Return the order that the buckets of the next step will follow, as far as this rank
        knows.
        """
        ready = self.core.ready_order()
        if self._order_is_known or not ready:
            return self._order()
        return settled_order(ready, self.graphs)

    def measured(self) -> Network:
        """Return how fast this rank saw buckets travel in the first step of training.

        Unknown before, and where the user wants runs to repeat bit for bit: sums depend on how
        buckets are cut.
        """
        timed = not torch.are_deterministic_algorithms_enabled()
        rate = self._measured_rate or (self.core.wire_rate() if timed else 0.0)
        return Network(rate, self.network.latency)

    def resume(
        self,
        progress: Progress,
        residuals: Mapping[str, torch.Tensor],
        follows: bool = False,
    ) -> None:
        """Resumes where a training was left. Collective: rank 0's order decides.

        Args:
            residuals: what error feedback keeps back, by parameter name; others have none.
            follows: this rank is about to join others, who go on by plans in this order.
        """
        self._follows = follows
        index_of = {param.name: index for index, param in enumerate(self._params)}
        self.core.resume(progress.steps)
        self._forget_plans()
        self._measured_rate, self.network = progress.network.rate, progress.network
        order = [index_of[name] for name in progress.order if name in index_of]
        trained, agreed = self._agreed(order)
        self._install([i for i in self._complete(agreed) if trained[i]])
        held = [(residuals.get(p.name), p.tensor.device) for p in self._params]
        loaded = [None if r is None else r.to(device, torch.float32) for r, device in held]
        self.core.load_residuals(loaded)

    def _order(self) -> list[int]:
        """Return the plan's order, followed by parameters unfrozen since it was made."""
        planned = self.plan.params
        later = set(planned)
        trained = (i for i, p in enumerate(self._params) if p.tensor.requires_grad)
        return [*planned, *(i for i in trained if i not in later)]

    def _complete(self, order: Sequence[int]) -> list[int]:
        """Return `order`, then the parameters that it lacks."""
        seen = set(order)
        return [*order, *(i for i in reversed(range(len(self._params))) if i not in seen)]

    def set_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let `hook` reduce the buckets from the next backward on; the same on every rank."""
        order = self._order()
        self.policy = replace(self.policy, hooked=True)
        self._forget_plans()
        self.core.set_hook(state, hook, self.routes.flags_group(self.policy))
        self._install(order)

    def _plan(self, order: Sequence[int]) -> BucketPlan:
        wire = Wire() if self._is_warming_up() else self.policy.wire
        specs = [self._param_spec(i, wire) for i in order]
        world = self._group.size()
        # Compiled graphs have been split where the first plan's buckets end.
        adapts = self._buckets.adaptive and not self.graphs
        network = self.network if adapts else Network()
        policy = replace(self.policy, wire=wire, network=network)
        node_ranks = len(self.routes.nodes.node_ranks) if self.routes.nodes else 1
        return make_plan(specs, order, self._buckets.on(network), policy, world, node_ranks)

    def _is_warming_up(self) -> bool:
        return self.core.steps() < self.policy.wire.warmup_steps

    def _install(self, order: Sequence[int], keep: bool = False) -> None:
        """Make a plan and hand it to the reducer. Collective where pipelines carry buckets.

        Args:
            keep: the plan that it replaces will be wanted again.
        """
        self.plan = self._plan(order)
        self._order_is_known = self.core.stats()["steps"] > 0
        until = self.policy.wire.warmup_steps if self._is_warming_up() else -1
        if self.plan.pipelined(0) and self._group.size() > 1:
            self.routes.make_pipelines(self.policy)
        for number, routes in enumerate(self.group_routes, start=1):
            if self.plan.pipelined(number):
                routes.make_pipelines(self.policy)
        nodes, gradients = self.routes.nodes, self.shares.gradients
        owners = self.shares.owners(nodes)
        sender = core.Sender(self.wire, self._group.rank(), nodes, gradients, owners)
        specs = [core.bucket_spec(i, b, sender) for i, b in enumerate(self.plan.buckets)]
        self.core.set_plan(specs, until, keep)
        self.plans.append(self.plan)
        self._recent[self._trained()] = len(self.plans)

    def _param_spec(self, index: int, wire: Wire) -> ParamSpec:
        param = self._params[index]
        tensor = self._tensors[index]
        spec = ParamSpec.of(index, tensor, param.sparse, wire.codec_for(param.name))
        shard = self.shares.place(index) if self.policy.shardable else None
        local, group = tensor is not param.tensor, self._group_of.get(param.name, 0)
        counted = even_numel(param.tensor) if local else None
        return replace(spec, shard=shard, group=group, local=local, counted=counted)

    def _regroup(self) -> None:
        """Take a recent plan or make a new one: other parameters are trained than are planned.
        Collective.
        """
        trained = self._trained()
        number = self._recent.get(trained, 0)
        known = number if self.core.keeps_plan(number) else 0
        reason = f"the others to train the same parameters ({len(trained)} on this rank)"
        alike = self._rendezvous.meet(reason, f"plan {known}")
        if not (known and alike):
            self._replan(keep=True)
            return
        self.core.restore_plan(known)
        self.plan, self._plan_changed = self.plans[known - 1], True

    def _trained(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self._params) if p.tensor.requires_grad)

    def _make_rendezvous(self) -> Rendezvous:
        return make_rendezvous(self._group, f"plan-{self._identity()}", Env.read().agree_timeout)

    def _identity(self) -> int:
        return zlib.crc32("\n".join(p.name for p in self._params).encode())

    def _forget_plans(self) -> None:
        self._recent.clear()
        self.core.forget_plans()

    def _end_step(self) -> None:
        """End a step for the reducer, where a plan is due."""
        with without_modes():  # those of the backward that has just ended
            self.during(self._plan_after_step)

    def _plan_after_step(self) -> None:
        if self._follows and self.core.stats()["steps"] == 1:
            self._install(self._order())  # the others have seen an order before
        else:
            self._replan()

    def _replan(self, keep: bool = False) -> None:
        """Make a plan by rank 0's ready order. Collective."""
        self._follow(settled_order(self.core.ready_order(), self.graphs), keep)

    def _follow(self, ready: Sequence[int], keep: bool = False) -> None:
        """Plan what any rank trains, in rank 0's `ready` order. Collective."""
        trained, order = self._agreed(ready)
        before = self.plan
        self._install([i for i in self._complete(order) if trained[i]], keep)
        self.regrouped = self.regrouped or self.plan != before
        self._plan_changed = True

    def _agreed(self, ready: Sequence[int]) -> tuple[list[bool], list[int]]:
        """Return whether any rank trains each parameter, and rank 0's `ready`. All ranks then know
        the same network.
        """
        mine = PlanFacts(self.core.trainable(), ready, self.measured())
        agreed = agree_on_plan(mine, self._group, self._params[0].tensor.device)
        self.network = agreed.network
        return list(agreed.trained), list(agreed.order)


def _copies(apart: Callable[[int], bool], ranks: Sequence[int], index: int) -> int:
    return 0 if apart(index) else ranks[index]
