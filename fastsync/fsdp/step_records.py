"""Records of the steps of a model whose parameters are shared: counters, and a timeline."""

from __future__ import annotations

import os
from typing import cast

import torch.distributed as dist
from torch import nn

from fastsync._build.env import Env
from fastsync.fsdp.context import Context
from fastsync.fsdp.module_hooks import State, state_of
from fastsync.timeline.recorder import RecordedModel, Recorder
from fastsync.timeline.stats import SyncStats, unit_stats
from fastsync.timeline.timeline_policy import TimelinePolicy

__all__ = ["Recording", "context_of", "record", "stats_of"]

Wanted = str | os.PathLike[str] | bool | TimelinePolicy


def record(
    root: nn.Module, policy: TimelinePolicy, group: dist.ProcessGroup | None = None
) -> Recorder:
    """Record the steps of `root` from now on.

    Args:
        group: the ranks that are recorded together; by default those of its mesh.

    Raises:
        RuntimeError: it is no root, has no parameters, or is recorded already.
    """
    context = context_of(root)
    if context.recorder is not None:
        raise RuntimeError(
            "this model is recorded already; write_timeline() writes what there is at any time"
        )
    places = [unit.place for s in _states_below(root) for unit in s.uses]
    if not places:
        raise RuntimeError("there is nothing to record: fully_shard() found no parameters")
    names = tuple(name for name, _ in root.named_parameters())
    model = RecordedModel(_kind(root), names, places[0].device, units=context.connections.infos)
    context.recorder = Recorder(policy, model, group or places[0].everybody())
    return context.recorder


def stats_of(root: nn.Module, one_rank_step: float | None) -> SyncStats:
    """Return what synchronising has cost this rank."""
    context = context_of(root)
    steps = context.recorder.steps() if context.recorder is not None else []
    counted, infos = context.counters(), context.connections.infos
    return unit_stats(counted, context.connections.log.steps(), infos, steps, one_rank_step)


def context_of(module: nn.Module) -> Context[State]:
    """Return the context that the units of a root share.

    Raises:
        RuntimeError: it is no root.
    """
    state = state_of(module)
    if state is None:
        raise RuntimeError(f"fully_shard() was not applied to this {type(module).__name__}")
    if state.is_root is False:
        raise RuntimeError(
            f"this {_kind(module)} is no root: ask the outermost module of fully_shard(), which "
            "knows of all units"
        )
    return state.context


def _states_below(root: nn.Module) -> list[State]:
    return [state for module in root.modules() if (state := state_of(module)) is not None]


def _kind(module: nn.Module) -> str:
    """Return the name of its class before fully_shard()."""
    return type(module).__name__.removeprefix("FSDP")


class Recording:
    """Methods of a root that tell of its steps."""

    def sync_stats(self, one_rank_step: float | None = None) -> SyncStats:
        """Counters of gathers and reductions, and times where `record_timeline()` records.

        Args:
            one_rank_step: seconds of a training step without other ranks, on as much data as each
                rank has here; gives the scaling efficiency.

        Raises:
            RuntimeError: the module is no root.
            ValueError: `one_rank_step` is not positive, or no two steps have been recorded.
        """
        return stats_of(cast(nn.Module, self), one_rank_step)

    def record_timeline(self, timeline: Wanted = True) -> None:
        """Record when units are gathered and reduced; every rank calls it, on the root.

        Args:
            timeline: as FastDDP's argument: a path that is written after 20 steps, True to record
                until training ends, or a `TimelinePolicy`. The same on every rank.

        Raises:
            RuntimeError: the module is no root, or is recorded already.
        """
        policy = TimelinePolicy.of(timeline)
        if policy is not None:
            record(cast(nn.Module, self), policy)

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what has been recorded so far; every rank calls it.

        Args:
            path: rank 0 writes this file.

        Raises:
            RuntimeError: nothing is recorded.
        """
        recorder = context_of(cast(nn.Module, self)).recorder
        if recorder is None:
            raise RuntimeError(
                "write_timeline() finds no recording; call record_timeline() on the root, on every "
                "rank"
            )
        recorder.write(os.fspath(path), Env.read().agree_timeout)
