"""`FastDDP(model, zero=3)`: FastDDP's interface to units that fully_shard() makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fastsync._torch import untraced
from fastsync.ddp.fast_ddp import FastDDP
from fastsync.fsdp.fsdp_module import context_of, record, stats_of, weights_of
from fastsync.fsdp.fully_shard import fully_shard
from fastsync.fsdp.group_choice import choose_units, contiguous, exchange_in_optimizers
from fastsync.fsdp.module_hooks import state_of
from fastsync.reducer import sync_checkpoint
from fastsync.reducer.mean_weights import MeanWeights
from fastsync.reducer.monitor import explained
from fastsync.timeline.recorder import Recorder
from fastsync.timeline.stats import SyncStats
from fastsync.wire.formats import Choice, Wire

_MADE_BY = "FastDDP(zero=3)"
_OTHER_WORDS = re.compile(r"(fastsync\.)?fully_shard(\(\))?|\bFSDP\b")


@dataclass(frozen=True)
class _NoReducer:
    """Reducer for torch's front, which asks it for something at the end of construction."""

    recorder: Recorder | None
    rounds: None = None

    def await_buffers(self, exchange: Callable[[], object]) -> None:
        """Exchange at once: the waits of ranks with units are not compared."""
        exchange()

    def prepare_for_backward(self, outputs: object) -> None:
        """Accept the announcement of a backward: units reduce in every one."""

    def _rebuild_buckets(self) -> bool:
        """Return that there are no buckets to make anew."""
        return False

    def _delay_all_reduce(self) -> None: ...
    def _set_static_graph(self) -> None: ...
    def _remove_autograd_hooks(self) -> None: ...
    def _check_reducer_finalized(self) -> None: ...


class ShardedDDP(FastDDP, zero=3):
    """Made by `FastDDP(model, zero=3)`: each rank keeps its share of the parameters, too.

    Parameters are DTensors with their global sizes. Gradients are reduced after every backward,
    under `no_sync()` too, so that they never take more than a share.
    """

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Cut the module into units, where DistributedDataParallel builds its engine."""
        contiguous(self.module)
        ignored = {p for n, p in self.module.named_parameters() if n in self.parameters_to_ignore}
        old = dict(self.module.named_parameters())
        shard = partial(
            fully_shard,
            mesh=_mesh_of(self),
            ignored_params=ignored,
            wire=self._policy.wire,
            parameter_wire=self._policy.zero.parameter_wire,
        )
        with _own_words():
            for unit in choose_units(self.module, self._policy.zero.units):
                shard(unit)
            shard(self.module)
        for module in self.module.modules():
            if (state := state_of(module)) is not None:
                state.made_by = _MADE_BY
        new = dict(self.module.named_parameters())
        exchange_in_optimizers(list(old.values()), [new[name] for name in old])
        context_of(self.module).conceals = True
        context_of(self.module).connections.in_memory = self._policy.wire.shared_memory
        self._module_parameters = [p for n, p in new.items() if n not in self.parameters_to_ignore]
        policy, group = self._timeline, self.process_group
        self.reducer = _NoReducer(None if policy is None else record(self.module, policy, group))
        self.logger = None
        self._passing_sync_batchnorm_handle(self.module)

    def _register_delay_all_reduce_hook(self, *args: object, **kwargs: object) -> None:
        raise _refused(
            "delay_all_reduce_named_params",
            "the hook that sends them would be on a parameter that its unit's shares replace",
        )

    def _set_static_graph(self) -> None:
        """Do nothing: units do not ask whether the graph changes."""

    @untraced
    def _pre_forward(self, *inputs: object, **kwargs: object) -> object:
        """Rank 0's buffers, and the inputs where the module is."""
        if self._save_points is not None:
            self._save_points.before_forward()
        if self.modules_buffers and self.forward_sync_buffers:
            with explained(self.process_group, "the broadcast of buffers"):
                self._sync_buffers()
        return self._to_kwargs_on_device(inputs, kwargs) if self.device_ids else (inputs, kwargs)

    def _run_ddp_forward(self, *inputs: object, **kwargs: object) -> object:
        """Run the module's forward, whose graphs are split by the hooks of units alone."""
        with _own_words():
            return self.module(*inputs, **kwargs)

    @untraced
    def _post_forward(self, output: object) -> object:
        if self.modules_buffers:
            self._buffer_watch.after_forward(self.module)
        return output

    def _to_kwargs_on_device(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        from torch.nn.parallel.scatter_gather import scatter_kwargs

        scattered, named = scatter_kwargs(inputs, kwargs, self.device_ids or [], self.dim)
        return scattered[0], named[0]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip as torch's function does; the norm is that of all ranks. Collective."""
        norm: Any = nn.utils.clip_grad_norm_(
            self.parameters(), max_norm, norm_type, error_if_nonfinite
        )
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in the form of torch.distributed.checkpoint: this rank's shares, by
        name.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return cast("dict[str, Any]", get_optimizer_state_dict(self.module, optimizer))

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: sync_checkpoint.State) -> None:
        """Load what `optimizer_state_dict()` returned. Collective."""
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self.module, optimizer, cast("dict[str, Any]", state))

    def sync_stats(self, one_rank_step: float | None = None) -> SyncStats:
        """Return the counters of `FastDDP.sync_stats` for units: gathers and reductions are
        collectives.
        """
        return stats_of(self.module, one_rank_step)

    def _weights(self) -> MeanWeights:
        return weights_of(self.module)

    def join_hook(self, **kwargs: object) -> Any:
        """Not supported.

        Raises:
            ValueError: always.
        """
        self._check_join()
        return super().join_hook(**kwargs)  # type: ignore[no-untyped-call]

    def set_wire(self, wire: Wire | Choice) -> None:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise _refused("set_wire()", "the wire of units is chosen with them")

    def sync_state_dict(self) -> dict[str, Any]:
        """Not supported: units keep nothing from step to step.

        Raises:
            ValueError: always.
        """
        raise _refused("sync_state_dict()", "units keep nothing from step to step")

    def load_sync_state_dict(
        self, state: sync_checkpoint.State | Sequence[sync_checkpoint.State]
    ) -> None:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise _refused("load_sync_state_dict()", "units keep nothing from step to step")


@contextmanager
def _own_words() -> Iterator[None]:
    """Name FastDDP in errors that name FSDP and fully_shard(), which the script did not call."""
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        text = str(error)
        if _OTHER_WORDS.search(text) and error.args == (text,):
            error.args = (_OTHER_WORDS.sub(_MADE_BY, text),)
        raise


def _refused(what: str, why: str) -> ValueError:
    return ValueError(f"zero=3 does not combine with {what}: {why}; use zero=0, 1 or 2")


def _mesh_of(model: ShardedDDP) -> DeviceMesh:
    given = getattr(model, "device_mesh", None)
    if given is not None:
        return cast(DeviceMesh, given)
    return DeviceMesh.from_group(model.process_group, model.device_type)
