"""FastDDP: a drop-in for torch.nn.parallel.DistributedDataParallel on fastsync's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastsync import _ext, consensus
from fastsync._torch_front import FrontLogger, FrontReducer
from fastsync._torch_private import (
    builtin_comm_hook,
    default_group,
    find_tensors,
    gloo_threads,
    has_python_reducer,
    split_graphs_at_buckets,
    untraced,
)
from fastsync.buffers import BufferWatch, buffer_arguments
from fastsync.codec import Wire
from fastsync.config import BucketPolicy, MixedPolicy, SyncPolicy, TimelinePolicy
from fastsync.engine import Engine, NamedParam
from fastsync.env import Env
from fastsync.logging_data import WrapFacts
from fastsync.mixed_precision import announce_mixed_precision, cast_buffers
from fastsync.plugin import check_device
from fastsync.recorder import RecordedModel, Recorder
from fastsync.stats import SyncStats, make_stats

__all__ = ["FastDDP"]


class FastDDP(DistributedDataParallel):
    """Averages gradients over ranks while backward is still running.

    Takes every argument of DistributedDataParallel and is an instance of it, so scripts and
    libraries that know DDP need no change. What differs:

    * `gradient_as_bucket_view` defaults to True: gradients live in the communication buffers and
      exist once. Unlike in DDP they may be kept, detached and zeroed like any tensor.
    * `find_unused_parameters` may be left out: parameters without gradient are handled, at no cost
      to the others, and named in one warning. False makes them an error, True silences the warning.
    * parameters may be frozen and unfrozen after wrapping (on every rank, before the same forward).
    * every backward that follows a forward outside `no_sync()` synchronises.
    * a difference between the ranks' models or settings is an error that names it, on every rank.

    Args:
        module: the module to train; replicated from rank 0 unless `init_sync` is False.
        bucket_cap_mb: size of a bucket in MiB; 25 by default, with a first bucket of 1.
        wire: what gradients travel as: a name of `fastsync.codec.wire_formats()`, a codec, or a
            `fastsync.Wire`. Sums are fp32. 16-bit gradients only become narrower, fp64 ones never.
        timeline: a path: records when each bucket is ready, packed, launched and done on every
            rank in 20 steps, and writes them there for `python -m fastsync.timeline`. True:
            records until training ends, for `sync_stats()` and `write_timeline()`. A
            `TimelinePolicy` says more. The same on every rank.

    Raises:
        RuntimeError: there is no process group, or no parameter to train.
        ValueError: an argument makes no sense.
        RankMismatchError: the ranks were given different models or settings.
        BuildError: the extension has to be compiled and cannot be.
    """

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
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = True,
        forward_sync_buffers: bool | None = None,
        *,
        wire: Any = "fp32",
        timeline: str | os.PathLike[str] | bool | TimelinePolicy = False,
    ) -> None:
        request = _Request(module, process_group, device_mesh, device_ids, output_device)
        self._buckets, self._policy, self._timeline = request.settle(
            lambda: BucketPolicy.from_mb(bucket_cap_mb, bucket_cap_mb_list),
            lambda: SyncPolicy(
                wire=Wire.of(wire),
                views=gradient_as_bucket_view,
                fail_on_unused=find_unused_parameters is False and not static_graph,
                static_graph=static_graph,
                skip_unused=skip_all_reduce_unused_params,
                warn_unused=find_unused_parameters is None and not static_graph,
                mixed=MixedPolicy.of(mixed_precision),
            ),
            lambda: TimelinePolicy.of(timeline),
        )
        self._buffer_watch = BufferWatch()
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            init_sync=init_sync,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=bool(find_unused_parameters),
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=cast(Any, bucket_cap_mb_list),
            **buffer_arguments(broadcast_buffers, forward_sync_buffers),
        )
        if forward_sync_buffers is not None:
            # On a torch without that argument this is the name of the same switch.
            self.broadcast_buffers = forward_sync_buffers
        self._set_mixed_precision(mixed_precision)

    def _set_mixed_precision(self, mixed_precision: Any) -> None:
        """Torch's front casts the inputs; casting parameters and gradients is the engine's."""
        self.mixed_precision = mixed_precision
        if mixed_precision is not None:
            ignored = self.parameters_to_ignore
            announce_mixed_precision(self.module, ignored, self._policy.mixed.param)
            cast_buffers(self.module, ignored, self._policy.mixed.buffer)

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Where DistributedDataParallel builds its engine, FastDDP builds another."""
        named = _named_params(self.module, self.parameters_to_ignore)
        engine = Engine(named, self.process_group, self._buckets, self._policy)
        facts = self._facts(static_graph)
        logger = FrontLogger(engine, facts)
        self.reducer = cast(Any, FrontReducer(engine, logger, self._record(engine)))
        self.logger = cast(Any, logger)
        cast(Any, self)._passing_sync_batchnorm_handle(self.module)
        split_graphs_at_buckets()

    def _record(self, engine: Engine) -> Recorder | None:
        if self._timeline is None:
            return None
        names = tuple(param.name for param in engine.params)
        device = engine.params[0].tensor.device
        model = RecordedModel(type(self.module).__name__, names, device, engine.plans)
        recorder = Recorder(self._timeline, model, self.process_group)
        engine.on_step = recorder.before_step
        return recorder

    def _facts(self, static_graph: bool) -> WrapFacts:
        group = self.process_group
        return WrapFacts(
            module_name=type(self.module).__name__,
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
            backend=dist.get_backend(group),
            gloo_threads=gloo_threads(group),
            device_ids=self.device_ids or (),
            output_device=-1 if self.output_device is None else self.output_device,
            broadcast_buffers=self.broadcast_buffers,
            has_sync_bn=any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules()),
            static_graph=static_graph,
            bucket_cap_bytes=self._buckets.caps[-1],
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self._policy.views,
        )

    @property
    def _engine(self) -> Engine:
        return cast(FrontReducer, self.reducer).engine

    @property
    def _recorder(self) -> Recorder | None:
        return cast(FrontReducer, self.reducer).recorder

    def _graph_buckets(self, ready: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Asked while torch.compile splits a graph of the module."""
        return self._engine.graph_buckets(ready)

    @untraced
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return cast(Any, super())._pre_forward(*inputs, **kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._policy.mixed.param is None:
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        with self._engine.computing():
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        """Broadcasts rank 0's buffers, unless no forward can have changed any since the last time.

        Under join() the ranks do not share a history.
        """
        front, watch = cast(Any, super()), self._buffer_watch
        usual = not (hasattr(self, "buffer_hook") or cast(Any, self)._join_config.enable)
        if not usual or (watch.stale and dist.get_world_size(self.process_group) > 1):
            front._sync_buffers()
        watch.stale = False

    @untraced
    def _post_forward(self, output: Any) -> Any:
        front = cast(Any, self)  # its methods carry no annotations
        if self.modules_buffers:
            self._buffer_watch.after_forward(self.module)
        if self._delay_all_reduce_all_params:
            front._clear_grad_buffer()
            return output
        if front._check_sync_bufs_post_fwd():
            front._sync_buffers()
        if torch.is_grad_enabled():
            sync = self.require_forward_param_sync = self.require_backward_grad_sync
            self._engine.after_forward(find_tensors(output), sync)
        else:
            self.require_forward_param_sync = False
        front._clear_grad_buffer()
        return output

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        cast(Any, super())._sync_final_model(is_last_joiner)
        self._buffer_watch.stale = True  # the ranks' forwards differ in number

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """A rank that ran out of inputs takes part in the others' step."""
        self._engine.shadow_step()

    def _match_unused_params_allreduce(self) -> None:
        """Nothing to do: used flags travel inside the buckets."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces each bucket with `hook(state, bucket)` instead of averaging it.

        As in DistributedDataParallel, `bucket` is a `torch.distributed.GradBucket` whose buffer
        has not been divided, and the hook returns a future of the reduced buffer. Unlike there, a
        hook may be replaced by another between two steps.

        Raises:
            ValueError: `wire` or `mixed_precision` compresses gradients already.
        """
        cast(Any, self)._check_comm_hook(hook)
        if self._policy.mixed.reduce is not None:
            raise ValueError(
                "mixed_precision and a communication hook would both choose what gradients travel "
                "as; leave one of them out"
            )
        if not self._policy.wire.plain:
            raise ValueError(
                f"wire={self._policy.wire.describe()!r} and a communication hook would both "
                "compress gradients; leave wire out to use the hook"
            )
        self.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
        self._comm_hooks = [(hook, state)]
        self._engine.set_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(self.process_group, builtin_comm_hook(comm_hook_type))
        self.logger._set_comm_hook_name(str(comm_hook_type))  # type: ignore[union-attr]

    def sync_stats(self, one_rank_step: float | None = None) -> SyncStats:
        """What synchronising has cost this rank: counters, and times where `timeline=` records.

        Args:
            one_rank_step: seconds of a training step without other ranks, on as much data as each
                rank has here; gives the scaling efficiency.

        Raises:
            ValueError: `one_rank_step` is not positive, or no two steps have been recorded.
        """
        engine = self._engine
        sizes = [bucket.nbytes for bucket in engine.plan.buckets]
        steps = self._recorder.steps() if self._recorder is not None else []
        return make_stats(engine.core.stats(), sizes, steps, one_rank_step)

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes what has been recorded so far; every rank calls it.

        Args:
            path: as in `TimelinePolicy`: rank 0 writes this file; with "{rank}", each its own.

        Raises:
            RuntimeError: nothing is recorded.
        """
        if self._recorder is None:
            raise RuntimeError(
                "write_timeline() finds no recording; wrap the model with "
                "FastDDP(model, timeline=True), on every rank"
            )
        self._recorder.write(os.fspath(path), Env.read().agree_timeout)


@dataclass(frozen=True)
class _Request:
    """What a constructor was asked to wrap; checked here before torch's front sees it."""

    module: nn.Module
    process_group: dist.ProcessGroup | None
    device_mesh: Any
    device_ids: Sequence[int | torch.device] | None
    output_device: int | torch.device | None

    def settle(
        self,
        buckets: Callable[[], BucketPolicy],
        policy: Callable[[], SyncPolicy],
        timeline: Callable[[], TimelinePolicy | None],
    ) -> tuple[BucketPolicy, SyncPolicy, TimelinePolicy | None]:
        """Checks the arguments and agrees on them with all ranks.

        A rank with an error still takes part, so that the others do not wait for it; it raises
        that error itself, from the report that they raise.
        """
        group = self._group()
        try:
            self._check_module()
            settled = buckets(), policy(), timeline()
            self._check_wire(settled[1].wire)
            self._check_dtypes(settled[1])
            _ext.load()
        except Exception as error:
            try:
                self._agree(group, {}, str(error))
            except consensus.RankMismatchError as report:
                raise error from report
            raise
        settings = {
            "torch": torch.__version__,
            "the module's device": self._params()[0].tensor.device.type,
            "bucket_cap_mb": str([cap / (1 << 20) for cap in settled[0].caps]),
            "wire": settled[1].wire.describe(),
            "gradient_as_bucket_view": str(settled[1].views),
            "find_unused_parameters=False": str(settled[1].fail_on_unused),
            "static_graph": str(settled[1].static_graph),
            "timeline": str(settled[2]),
            "mixed_precision": str(settled[1].mixed),
        }
        self._agree(group, settings, "")
        return settled

    def _group(self) -> dist.ProcessGroup:
        if self.process_group is not None and self.device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if self.device_mesh is not None:
            if self.device_mesh.ndim != 1:
                raise RuntimeError(f"Only 1D device mesh is supported, but got {self.device_mesh}.")
            mesh_group: dist.ProcessGroup = self.device_mesh.get_group(mesh_dim=0)
            return mesh_group
        return self.process_group or default_group()

    def _params(self) -> list[NamedParam]:
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return _named_params(self.module, ignored)

    def _check_dtypes(self, policy: SyncPolicy) -> None:
        if policy.mixed.reduce is None:
            return
        wide = [p.name for p in self._params() if p.tensor.dtype is torch.float64]
        if wide:
            raise ValueError(
                f"mixed_precision cannot reduce parameters of float64, as {wide[0]!r} is; convert "
                "the model to float32 before wrapping it"
            )

    def _check_module(self) -> None:
        if has_python_reducer():
            raise RuntimeError(
                "torch._dynamo.config.optimize_ddp is 'python_reducer', which puts code of torch's "
                "in the place of FastDDP's engine; set it to 'ddp_optimizer' (the default), or use "
                "DistributedDataParallel"
            )
        params = [p.tensor for p in self._params()]
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in params):
            raise RuntimeError(
                "FastDDP cannot wrap a module with uninitialized parameters. Run a dummy forward "
                "pass to correctly initialize the modules"
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
                f"device_ids is {self.device_ids} and output_device {self.output_device}, but the "
                "module is on the CPU; leave both out, or move the module before wrapping it"
            )

    def _check_wire(self, wire: Wire) -> None:
        for param in self._params():
            codec = wire.codec_for(param.name)
            check_device(codec, param.name, param.tensor.device)
            if param.tensor.is_complex() and param.tensor.requires_grad and codec.name != "fp32":
                raise ValueError(
                    f"parameter {param.name!r} is {param.tensor.dtype}, which {codec.name} cannot "
                    f"carry; wire=fastsync.Wire(..., overrides={{{param.name!r}: 'fp32'}}) keeps it"
                )

    def _agree(self, group: dist.ProcessGroup, settings: dict[str, str], error: str) -> None:
        params = [
            (p.name, tuple(p.tensor.shape), str(p.tensor.dtype), p.tensor.requires_grad)
            for p in self._params()
            if not isinstance(p.tensor, nn.parameter.UninitializedParameter)
        ]
        devices = [p.tensor.device for p in self._params()]
        device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
        consensus.agree(consensus.Statement(settings, params, error), group, device)


def _named_params(module: nn.Module, ignored: Collection[str]) -> list[NamedParam]:
    """Every parameter once, under its first name, frozen ones included."""
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
