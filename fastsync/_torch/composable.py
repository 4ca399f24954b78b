"""torch's register of what has been applied to a module: fully_shard(), replicate()."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry

__all__ = ["is_replicated", "register_sharded"]


def register_sharded(module: nn.Module) -> None:
    """Make replicate() leave the module's parameters alone, as those of torch's fully_shard()."""
    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Return whether replicate() was applied to it."""
    return "replicate" in (_get_registry(module) or {})
