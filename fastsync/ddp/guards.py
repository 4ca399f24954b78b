"""Guards that check gradients and parameters for faults that raise no error."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from fastsync.ddp.added_parameters import AddedParameterGuard
from fastsync.ddp.nonfinite import NonFiniteGuard
from fastsync.ddp.replica_check import ReplicaGuard
from fastsync.ddp.scaler_guard import ScalerGuard
from fastsync.reducer.engine import Engine

__all__ = ["make_guards"]


def make_guards(engine: Engine, module: nn.Module, ignored: Collection[str]) -> list[object]:
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
