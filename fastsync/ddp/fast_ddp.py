"""FastDDP: a drop-in for torch.nn.parallel.DistributedDataParallel on fastsync's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fastsync._build.env import Env
from fastsync._torch import (
    BuiltinCommHookType,
    Front,
    backward_is_running,
    broadcast_coalesced,
    builtin_comm_hook,
    find_tensors,
    is_dtensor,
    local_of,
    split_graphs_at_buckets,
    untraced,
)
from fastsync.config import compatibility
from fastsync.config.arguments import Faults, Zero, moved
from fastsync.config.compatibility import Setup
from fastsync.config.fault_policies import ElasticPolicy, PreemptionPolicy, ReplicaPolicy
from fastsync.config.param_groups import Group, GroupKey
from fastsync.config.policy import BucketPolicy, MixedPolicy, SyncPolicy
from fastsync.config.sync_modes import SyncMode, sync_mode
from fastsync.ddp.added_parameters import AddedParameterGuard
from fastsync.ddp.buffers import (
    BufferWatch,
    broadcast,
    buffer_arguments,
    by_group,
    can_broadcast,
)
from fastsync.ddp.ddp_objects import DDPReducer
from fastsync.ddp.elastic_training import Elastic, Membership, make_elastic
from fastsync.ddp.logging_data import DDPLogger, construction_data
from fastsync.ddp.nonfinite import NonFiniteGuard, ScalerGuard
from fastsync.ddp.preemption_handler import SavePoints
from fastsync.ddp.rejoin import Returns
from fastsync.ddp.replica_check import ReplicaGuard
from fastsync.ddp.request import Request, named_params
from fastsync.ddp.skipping import Attempt, Skips
from fastsync.reducer import sync_checkpoint
from fastsync.reducer.engine import Engine
from fastsync.reducer.mean_weights import MeanWeights
from fastsync.reducer.monitor import come_together, explained
from fastsync.reducer.process_groups import OwnGroups, find_parts, new_group
from fastsync.reducer.weak_calls import weakly
from fastsync.sync.rounds import Rounds, make_rounds, rounds_of
from fastsync.timeline.recorder import Recorder, TimelinePolicy, record_steps
from fastsync.timeline.stats import SyncStats, make_stats
from fastsync.wire.formats import Choice, Wire
from fastsync.zero.gradient_norms import clip_norm
from fastsync.zero.gradient_proxies import averages, is_spread
from fastsync.zero.sharded_optimizer import ShardedOptimizers
from fastsync.zero.state_passing import Passing, Stateful

if TYPE_CHECKING:
    from typing_extensions import Self


class FastDDP(Front):
    """Averages gradients over ranks while backward is still running.

    Takes every argument of DistributedDataParallel and is an instance of it, so scripts and
    libraries that know DDP need no change. What differs:

    * `gradient_as_bucket_view` defaults to True: gradients live in the communication buffers and
      exist once. Unlike in DDP they may be kept, detached and zeroed like any tensor.
    * `find_unused_parameters` may be left out: parameters without gradient are handled, at no cost
      to the others, and named in one warning. False makes them an error, True silences the warning.
    * parameters may be frozen and unfrozen after wrapping (on every rank, before the same forward).
    * each forward outside `no_sync()` has one backward that synchronises, in any order; all other
      work on the parameters, as on the bare module, stays local.
    * a difference between the ranks' models or settings is an error that names it, on every rank.

    Args:
        module: the module to train; replicated from rank 0 unless `init_sync` is False.
        bucket_cap_mb: size of a bucket in MiB; by default 25, with a first bucket of 1, and less
            where the first step finds the network slow.
        wire: what gradients travel as: a codec, a `fastsync.Wire`, or a name that
            `fastsync.wire.formats.wire_formats()` lists. Sums are fp32. 16-bit gradients
            only become narrower, fp64 ones never.
        timeline: a path: writes there what every rank did in 20 steps, for `python -m
            fastsync.timeline`. True: records until training ends, for `sync_stats()` and
            `write_timeline()`. A `TimelinePolicy` says more. The same on every rank.
        zero: the stage of sharding, or a `fastsync.Zero` that says more. 1 shards the state of
            every optimizer: each rank keeps, and updates, a part of the parameters for all, and
            between backward and step it has the gradients of that part alone. 2 reduces gradients
            after every backward, under `no_sync()` too, so that they never take more; see
            docs/zero.md. 3 shards parameters, too; see docs/zero3.md.
        faults: what happens when gradients are not finite, replicas differ, a step fails, a rank
            dies or a machine is taken away: a `fastsync.Faults`.
        sync: when ranks average: None, at every step; or a `fastsync.LocalSGD`, `DiLoCo` or
            `Delayed`, with which gradients stay local; see docs/sync.md. "diloco:64" means
            `DiLoCo(64)`, and "local:" and "delayed:" likewise.
        groups: parameters that are averaged over other ranks than those of the process group:
            patterns of their names, modules or parameters, and for each the process group of those
            of its ranks that have the same ones, or a `fastsync.Group`; see docs/means.md.

    Raises:
        RuntimeError: there is no parameter to train.
        TypeError: there is no such argument, or there is none any more.
        ValueError: there is no process group, or an argument makes no sense.
        RankMismatchError: the ranks were given different models or settings.
        BuildError: the extension has to be compiled and cannot be.
    """

    _by_stage: ClassVar[dict[int, type[FastDDP]]] = {}  # a stage with a class of its own
    # Parts that are made on request. A copy of the model makes its own.
    _elastic: Elastic | None = None
    _returns: Returns | None = None
    _saves: PreemptionPolicy | None = None
    _save_points: SavePoints | None = None
    _skips: Skips | None = None
    _meets = False  # torch's constructor is running, on all ranks

    def __init_subclass__(cls, zero: int | None = None, **kwargs: Any) -> None:
        """Let FastDDP make objects of this class at stage `zero`."""
        super().__init_subclass__(**kwargs)
        if zero is not None:
            FastDDP._by_stage[zero] = cls

    @classmethod
    def class_for(cls, zero: int | Zero) -> type[Self]:
        """Return the class of the models of a stage: this one, or the subclass made for it."""
        return cast("type[Self]", FastDDP._by_stage.get(_stage_of(zero), cls))

    def __new__(cls, *args: object, **kwargs: Any) -> Self:
        stage = _stage_of(kwargs.get("zero", 0))
        wanted = FastDDP._by_stage.get(stage)
        if wanted is None or issubclass(cls, wanted):
            return super().__new__(cls)
        if cls not in wanted.__mro__:
            raise ValueError(
                f"zero={stage} makes a model of another class than {cls.__name__}: call "
                "fastsync.FastDDP itself"
            )
        return cast("Self", super().__new__(wanted))

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool | None = None,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = True,
        forward_sync_buffers: bool | None = None,
        *,
        wire: Wire | Choice = "fp32",
        timeline: str | os.PathLike[str] | bool | TimelinePolicy = False,
        zero: int | Zero = 0,
        faults: Faults | None = None,
        sync: SyncMode | str | None = None,
        groups: Mapping[GroupKey, dist.ProcessGroup | Group] | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise moved(unknown)
        faults = faults or Faults()
        request = Request(module, process_group, device_mesh, device_ids, output_device, groups)
        self._buckets, self._policy, self._timeline, self._saves = request.settle(
            lambda: BucketPolicy.from_mb(bucket_cap_mb, bucket_cap_mb_list),
            lambda: SyncPolicy(
                wire=Wire.of(wire),
                views=gradient_as_bucket_view,
                fail_on_unused=find_unused_parameters is False and not static_graph,
                static_graph=static_graph,
                skip_unused=skip_all_reduce_unused_params,
                warn_unused=find_unused_parameters is None and not static_graph,
                mixed=MixedPolicy.of(mixed_precision),
                zero=Zero.of(zero),
                nonfinite=faults.nonfinite,
                replicas=ReplicaPolicy.of(faults.replicas),
                on_skip=faults.on_skip,
                elastic=ElasticPolicy.of(faults.elastic),
                sync=_mode(sync, delay_all_reduce_named_params),
            ),
            lambda: TimelinePolicy.of(timeline),
            lambda: PreemptionPolicy.of(faults.on_preemption),
        )
        self._buffer_watch = BufferWatch()
        self._meets = init_sync
        with request.wrapping():
            super().__init__(
                module,
                dim=dim,
                init_sync=init_sync,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=bool(find_unused_parameters),
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                bucket_cap_mb_list=cast(Any, bucket_cap_mb_list),
                **request.placed,
                **buffer_arguments(broadcast_buffers, forward_sync_buffers),
            )
            if init_sync:
                self._sync_apart(forward_sync_buffers is not None or broadcast_buffers is not False)
        self._meets = False
        self._complete(mixed_precision, forward_sync_buffers)

    def _complete(self, mixed_precision: object, forward_sync_buffers: bool | None) -> None:
        """Let the engine cast parameters and gradients; torch's front casts the inputs."""
        if forward_sync_buffers is not None:
            self.broadcast_buffers = forward_sync_buffers  # as an older torch calls it
        self.mixed_precision = mixed_precision
        if mixed_precision is not None:
            self._policy.mixed.change(self.module, self.parameters_to_ignore)
        self._make_elastic()
        if self._policy.sync is not None:
            shares = cast(DDPReducer, self.reducer).shares_buffers
            self.require_forward_param_sync = shares
        if self._saves is not None:
            self._save_points = SavePoints(self._saves, self.process_group, self.parameters())

    def _make_elastic(self) -> None:
        if self._policy.elastic is not None:
            self._elastic = make_elastic(self, self._engine, self._policy.elastic)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("_elastic", "_returns", "_guards", "_saves", "_save_points", "_skips"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_elastic()

    def _build_params_for_reducer(self) -> tuple[list[torch.Tensor], list[bool]]:
        """Meet all ranks before torch's constructor compares and broadcasts.

        Torch cannot look up from waiting there. What a module runs before, such as
        `named_buffers()`, may take long on one rank. Groups have broadcasts of their own.
        """
        built = super()._build_params_for_reducer()
        if self._meets:
            come_together(self.process_group, "the wrapping of the model")
        self._ignored = self.parameters_to_ignore
        self.parameters_to_ignore = self._ignored.union(*(names for _, names in self._apart()))
        return built

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[torch.Tensor]
    ) -> dict[int, str]:
        """Torch's constructor calls this after its broadcast, and a script may later."""
        self.parameters_to_ignore = self.__dict__.pop("_ignored", self.parameters_to_ignore)
        return super()._build_debug_param_to_name_mapping(parameters)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        for group, its in by_group(
            tensors, self.module, self._policy.named_groups, self.process_group
        ):
            if can_broadcast(its, group):
                broadcast(its, group, authoritative_rank)
            else:
                broadcast_coalesced(group, its, buffer_size, authoritative_rank)

    def _apart(self) -> list[tuple[dist.ProcessGroup, frozenset[str]]]:
        """Return what torch's front cannot broadcast: parts of the model, by the ranks that have
        the same.
        """
        groups = self._policy.named_groups
        if self._policy.zero.stage == 3:  # whose DTensors are shards
            return groups
        others = {name for name, param in self.module.named_parameters() if is_dtensor(param)}
        others -= self.parameters_to_ignore.union(*(names for _, names in groups))
        return [*groups, (self.process_group, frozenset(others))] if others else groups

    def _sync_apart(self, buffers: bool) -> None:
        """Replicate what torch's front has left out from the first rank that has it."""
        named = [*self.module.named_parameters(), *(self.module.named_buffers() if buffers else ())]
        for group, names in self._apart():
            states = [
                local_of(tensor) if is_dtensor(tensor) else tensor.detach()
                for name, tensor in named
                if name in names
            ]
            # Torch does not copy a tensor onto itself where a dimension of one element has another
            # stride than it would give it.
            flat = [state.view(-1) if state.is_contiguous() else state for state in states]
            come_together(group, "the wrapping of the model")
            broadcast_coalesced(group, flat, self.broadcast_bucket_size, 0)

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build FastDDP's engine, where DistributedDataParallel builds its own."""
        named = named_params(self.module, self.parameters_to_ignore)
        mode, own = self._policy.sync, OwnGroups()
        group, nodes = self.process_group, None
        if mode is not None and mode.part_size > 1:
            nodes = find_parts(group, mode.within)
            group = new_group(group, nodes.node_ranks, "gradients within= a part", own)
        engine = Engine(named, group, self._buckets, self._policy)
        own.end_with(engine.core)
        engine.unused.current = partial(
            named_params, self.module, frozenset(self.parameters_to_ignore)
        )
        data = construction_data(self, engine, self._buckets.caps[-1], static_graph)
        logger = DDPLogger(engine, data, self.find_unused_parameters and not static_graph)
        self._guards = _make_guards(engine, self.module, frozenset(self.parameters_to_ignore))
        self._skips = Skips(engine) if self._policy.may_skip else None
        rounds = None
        if mode is not None:
            elastic = self._policy.elastic is not None
            on_round = weakly(self._sync_buffers_after_round)
            rounds = make_rounds(mode, named, self.process_group, on_round, nodes, elastic)
        # After the rounds, which so see a step once its ranks have exchanged what they updated.
        sharded = ShardedOptimizers(engine, self._policy.zero) if self._policy.zero.stage else None
        recorder = record_steps(
            self._timeline,
            type(self.module).__name__,
            engine,
            self.process_group,
            None if rounds is None else rounds.count_steps,
        )
        if rounds is not None and recorder is not None:
            rounds.exchange.note = recorder.note
        lockstep = weakly(self._in_lockstep)
        self.reducer = DDPReducer(engine, logger, recorder, lockstep, sharded, rounds)
        self.logger = logger
        self._passing_sync_batchnorm_handle(self.module)
        split_graphs_at_buckets()

    def _in_lockstep(self) -> bool:
        """Return whether all ranks have all forwards in common: under join(), and no_sync()."""
        return bool(self._join_config.enable or self._engine.policy.reduces_always)

    @property
    def _engine(self) -> Engine:
        return cast(DDPReducer, self.reducer).engine

    @property
    def _recorder(self) -> Recorder | None:
        return cast(DDPReducer, self.reducer).recorder

    @property
    def _rounds(self) -> Rounds | None:
        return cast(DDPReducer, self.reducer).rounds

    def end_round(self) -> None:
        """Average now, so that all ranks have the same parameters: to evaluate them, or save them.

        Collective, between steps. What is on its way is merged, and a round begins. Without `sync`
        this does nothing.

        Raises:
            RankMismatchError: the ranks have not made the same steps.
            SyncFault: a rank has ended.
        """
        if self._rounds is not None:
            self._rounds.end_round()

    def _sync_buffers_after_round(self) -> None:
        """Broadcast rank 0's buffers, if forwards would without `sync`."""
        if self.broadcast_buffers and self.modules_buffers:
            self._sync_buffers()

    def _graph_buckets(self, ready: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Asked while torch.compile splits a graph of the module."""
        return self._engine.graph_buckets(ready)

    @untraced
    def _pre_forward(self, *inputs: object, **kwargs: object) -> object:
        if self._join_config.enable:  # torch's Join does not call join()
            self._check_join()
        if self._save_points is not None and not backward_is_running():
            self._save_points.before_forward()  # not in a checkpoint, which runs a forward again
        with explained(self.process_group, "the start of a forward"):
            return super()._pre_forward(*inputs, **kwargs)

    def _run_ddp_forward(self, *inputs: object, **kwargs: object) -> object:
        if self._policy.mixed.param is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        with self._engine.computing():
            return super()._run_ddp_forward(*inputs, **kwargs)

    def _sync_buffers(self) -> None:
        """Broadcast rank 0's buffers, unless no forward can have changed any; always in a join."""
        watch = self._buffer_watch
        usual = not (hasattr(self, "buffer_hook") or self._join_config.enable)
        if not usual or (watch.stale and self.process_group.size() > 1):
            cast(DDPReducer, self.reducer).await_buffers(super()._sync_buffers)
        watch.stale = False

    @untraced
    def _post_forward(self, output: object) -> object:
        if self.modules_buffers:
            self._buffer_watch.after_forward(self.module)
        if self._delay_all_reduce_all_params:
            self._clear_grad_buffer()
            return output
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if torch.is_grad_enabled():
            reducer = cast(DDPReducer, self.reducer)
            sync = self.require_backward_grad_sync and not reducer.local
            self.require_forward_param_sync = sync and reducer.shares_buffers
            always = self._engine.policy.reduces_always
            self._engine.after_forward(find_tensors(output), sync or always)
            if self._rounds is not None and self.require_backward_grad_sync:
                self._rounds.note_marks("forward_end", "backward_start")
        else:
            self.require_forward_param_sync = False
        self._clear_grad_buffer()
        return output

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """Join as in DistributedDataParallel.

        Raises:
            ValueError: the model has a feature that does not combine with it; see
                fastsync/config/compatibility.py.
        """
        if enable:
            self._check_join()
        return super().join(divide_by_initial_world_size, enable, throw_on_early_termination)

    def _check_join(self) -> None:
        saves = self._saves is not None
        dtensors = any(map(is_dtensor, self.parameters()))
        compatibility.check(Setup(self._policy, join=True, on_preemption=saves, dtensors=dtensors))

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        self._buffer_watch.stale = True  # the ranks' forwards differ in number

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in the others' step, on a rank that ran out of inputs."""
        self._engine.shadow_step()

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: used flags travel inside the buckets."""

    def add_weight(
        self, weight: float | torch.Tensor, mean: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Give the next micro-batch a weight, as of the tokens that its loss sums up.

        The gradients of a step become the sum of those of all ranks' micro-batches, divided by the
        sum of all weights, instead of their mean over ranks. Call it on every rank, once for each
        micro-batch, between the last synchronised step and the micro-batch's backward.

        Args:
            weight: a number, or a tensor with one element.
            mean: the micro-batch's loss, if that is a mean over `weight` tokens.

        Returns:
            `mean` times `weight`, whose backward to call; None without `mean`.

        Raises:
            ValueError: it makes no sense, or something else divides the gradients.
        """
        self._weights().add(weight)
        return None if mean is None else mean * weight

    def _weights(self) -> MeanWeights:
        engine = self._engine
        if engine.weights is None:
            compatibility.check(Setup(self._policy, weights=True))
            params = [param.tensor for param in engine.params]
            return engine.use_weights(partial(averages, params), partial(is_spread, params))
        return engine.weights

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Reduce each bucket with `hook(state, bucket)` instead of averaging it.

        As in DistributedDataParallel, `bucket` is a `torch.distributed.GradBucket` whose buffer
        has not been divided, and the hook returns a future of the reduced buffer. Unlike there, a
        hook may be replaced by another between two steps. In a step with `add_weight()` the buffer
        has been multiplied by ranks / sum of all weights, so that the hook's mean over ranks is the
        weighted one.

        Raises:
            ValueError: the model has a feature that does not combine with it; see
                fastsync/config/compatibility.py.
        """
        self._check_comm_hook(hook)
        compatibility.check(Setup(self._policy, hook=True))
        self._make_gradients_whole()
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks = [(hook, state)]
        self._engine.set_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self.register_comm_hook(self.process_group, builtin_comm_hook(comm_hook_type))
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def skipping(self, *errors: type[Exception]) -> AbstractContextManager[Attempt]:
        """Run one forward and backward, which this rank leaves out if they raise one of `errors`.

        The gradients are then the averages of the ranks that have some, on every rank alike. So
        every rank goes on to `optimizer.step()`, after the block. If all ranks skip, there are no
        gradients, and the optimizer does nothing. Needs `on_skip="average_others"`.

        Raises:
            RuntimeError: the block holds not one backward that synchronises, or a step of the
                optimizer.
            ValueError: no class of errors is given, or layers exchange something in a forward.
        """
        if self._skips is None:
            raise RuntimeError(
                "skipping() needs FastDDP(model, faults=Faults(on_skip='average_others'))"
            )
        return self._skips.attempt(self, self._pass_forward, errors)

    def _pass_forward(self, begun: bool) -> None:
        """Do what comes before and after a forward that this rank leaves out."""
        if not begun:
            self._pre_forward()
        if self.modules_buffers:
            self._buffer_watch.after_forward(self.module)

    @property
    def elastic(self) -> Membership | None:
        """Return the ranks that train at present; None without `elastic=`."""
        return None if self._elastic is None else self._elastic.now

    def catch_up(self, *states: Stateful) -> int:
        """Return the step at which this rank begins: call it on every rank, before the first step.

        Called again, without `states`, it returns the step at which this rank goes on: where the
        others have averaged without it (`patience`), a later one, with what they have.

        A rank that `python -m fastsync.elastic` has started again, or that joins, gets everything
        from those that train, between two of their steps: parameters, buffers, and `states`.

        Args:
            states: optimizers, schedulers and whatever else has `state_dict` and `load_state_dict`;
                the same on every rank, in one order.

        Returns:
            How many steps there have been: 0 at the start.

        Raises:
            RankMismatchError: the others train another model, or with other settings; on this rank
                alone.
            ValueError: a second model calls this. What the others have does not fit, or they have,
                with `zero`, an optimizer that is not among `states`; on this rank alone.
            SyncFault: the others do not take it in, or end before.
        """
        if self._policy.elastic is None:
            raise RuntimeError("catch_up() needs FastDDP(model, faults=Faults(elastic=True))")
        if self._returns is not None and states:
            raise RuntimeError("catch_up() is given states once, before the first step")
        if self._returns is not None:
            self._returns.come_back_if_late()
        elif self._elastic is not None and self._elastic.identity.lasting:
            passing = Passing(states, cast(DDPReducer, self.reducer).sharded)
            self._returns = Returns(self.module, self._engine, self._elastic, passing)
            self._returns.take_part([str(cap) for cap in self._buckets.caps])
        return self._engine.core.steps() if self._rounds is None else self._rounds.steps

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is `max_norm` at most.

        As `torch.nn.utils.clip_grad_norm_(self.parameters(), ...)`, for less: where it can be,
        squares are summed up with the averages. With `zero` it is collective.

        Returns:
            The total norm before, zero-dimensional.

        Raises:
            RuntimeError: it is not finite and `error_if_nonfinite`, or ranks do not come.
        """
        holders = cast(DDPReducer, self.reducer).holders()
        return clip_norm(self.parameters(), max_norm, norm_type, error_if_nonfinite, holders)

    def set_wire(self, wire: Wire | Choice) -> None:
        """Send gradients as `wire` from the next step on.

        Collective: every rank calls it, between the same two steps. What error feedback has kept
        back stays where `wire` has error feedback, and is freed where it has not.

        Raises:
            ValueError: `wire` makes no sense, or a communication hook is registered.
            RankMismatchError: the ranks differ in it, or another rank raised.
        """
        request = Request(self.module, self.process_group, None, None, None)
        steps = self._engine.core.steps()
        settled = request.settle_wire(lambda: self._with_wire(wire), steps)
        self._make_gradients_whole()
        self._policy = settled
        self._engine.set_wire(settled.wire)

    def _make_gradients_whole(self) -> None:
        """They may not be spread by what travels from now on."""
        sharded = cast(DDPReducer, self.reducer).sharded
        if sharded is not None:
            sharded.make_gradients_whole()

    def _with_wire(self, wire: Wire | Choice) -> SyncPolicy:
        if self._policy.hooked or self._comm_hooks:
            raise ValueError(
                "a communication hook reduces the gradients, so they cannot travel in a wire "
                "format too; wrap the model again to leave the hook"
            )
        kept = self._policy.wire.shared_memory
        return replace(self._policy, wire=replace(Wire.of(wire), shared_memory=kept))

    def sync_state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs of this rank's synchronisation beside model and optimizer.

        Save it on every rank; it differs from rank to rank. No collective.

        Returns:
            Plain values and tensors, for torch.save and torch.load(weights_only=True): by parameter
            name, `residuals` (what error feedback keeps back: fp32, of the parameter's shape);
            `rounds` (with `sync`: outer parameters and momentum, averages on their way, steps);
            `steps`, `order` (parameters, as buckets hold them), `rate` (bytes of gradients per
            second) and `latency` (seconds of a collective of nothing), `rank`, `world_size`,
            `wire`, `version`.
        """
        state = sync_checkpoint.capture(self._engine)
        return state if self._rounds is None else {**state, "rounds": self._rounds.state()}

    def load_sync_state_dict(
        self, state: sync_checkpoint.State | Sequence[sync_checkpoint.State]
    ) -> None:
        """Resume where `sync_state_dict()` was called.

        Collective: every rank calls it, before a forward. After a restart with as many ranks, each
        passes its own state, and the training continues with the same bits. After a change of
        world size all ranks pass the list of the states of all old ranks. The sum over ranks of
        every residual is then kept: exactly with more ranks, rounded once to fp32 with fewer.

        Raises:
            ValueError, TypeError: the state does not fit the model, its wire or the ranks.
            RankMismatchError: another rank raised, or the states are of different steps.
        """
        group = self._engine.group
        found: dict[str, Any] = {}

        def check() -> None:
            given = [state] if isinstance(state, Mapping) else state
            found.update(rounds_of(self._rounds, given, group.rank(), group.size()))

        sync_checkpoint.restore(self._engine, state, check)
        if self._rounds is not None:
            self._rounds.load(found)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's share of the optimizer's state, for torch.distributed.checkpoint.

        `torch.save` writes the whole state, read from the other ranks. The form is that of torch's
        `get_optimizer_state_dict`. For an optimizer without state, it is room for the state of a
        checkpoint; that is collective.

        Raises:
            ValueError: a parameter is not the model's, or its state cannot be saved in pieces.
        """
        return cast(DDPReducer, self.reducer).optimizers(self.module).capture(optimizer)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: sync_checkpoint.State) -> None:
        """Resume from what `optimizer_state_dict()` returned, once it has been loaded.

        Or from what `optimizer.state_dict()` returned, on every rank. Collective.

        Raises:
            ValueError, TypeError: it is that of another model, or nothing has been loaded.
        """
        cast(DDPReducer, self.reducer).optimizers(self.module).restore(optimizer, state)

    def sync_stats(self, one_rank_step: float | None = None) -> SyncStats:
        """Return what synchronising has cost this rank: counters, and times where `timeline=`
        records.

        Args:
            one_rank_step: seconds of a training step without other ranks, on as much data as each
                rank has here; gives the scaling efficiency.

        Raises:
            ValueError: `one_rank_step` is not positive, or no two steps have been recorded.
        """
        engine, recorder = self._engine, self._recorder
        sizes = [bucket.nbytes for bucket in engine.plan.buckets]
        steps = recorder.steps() if recorder is not None else []
        step_timing = engine.step_timing.measured()
        stats = make_stats(engine.routes.counters(), sizes, steps, one_rank_step, step_timing)
        return stats if self._rounds is None else replace(stats, **self._rounds.counters())

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what has been recorded so far; every rank calls it.

        Args:
            path: rank 0 writes this file.

        Raises:
            RuntimeError: nothing is recorded.
        """
        if self._recorder is None:
            raise RuntimeError(
                "write_timeline() finds no recording; wrap the model with "
                "FastDDP(model, timeline=True), on every rank"
            )
        self._recorder.write(os.fspath(path), Env.read().agree_timeout)


def _stage_of(zero: int | Zero) -> int:
    return zero.stage if isinstance(zero, Zero) else zero


def _mode(wanted: SyncMode | str | None, delayed: object) -> SyncMode | None:
    mode = sync_mode(wanted)
    if mode is not None and delayed:
        raise ValueError(
            "delay_all_reduce_named_params averages gradients at every step, which sync= leaves on "
            "their ranks; leave one of them out"
        )
    return mode


def _make_guards(engine: Engine, module: nn.Module, ignored: Collection[str]) -> list[object]:
    """Return the guards that the policy asks for; each works as long as it is referenced."""
    policy = engine.policy
    guards: list[object] = [AddedParameterGuard(engine, module, ignored)]
    if policy.checks_finite:
        guards.append(NonFiniteGuard(engine))
    if policy.replicas is not None and engine.group.size() > 1:
        guards.append(ReplicaGuard(engine, policy.replicas))
    if policy.groups and engine.group.size() > 1:
        guards.append(ScalerGuard(engine))
    return guards
