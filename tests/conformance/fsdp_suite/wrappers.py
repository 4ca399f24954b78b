"""Wrappers that the suite can put in place of torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed.fsdp
from torch import nn
from torch.testing._internal import common_fsdp

import fastsync
from tests.conformance.fsdp_suite.counting import note_modules
from tests.conformance.fsdp_suite.peek import PEEKED, let_modules_peek, peek

__all__ = ["WRAPPERS", "Suite", "Wrapper"]


@dataclass(frozen=True)
class Wrapper:
    """Functions of one implementation; None where it lacks one.

    Attributes:
        state: in place of `fully_shard.state`.
        names: what else tests import that is to be another thing.
    """

    fully_shard: Callable[..., Any]
    state: Callable[[nn.Module], Any]
    register_fsdp_forward_method: Callable[..., Any]
    share_comm_ctx: Callable[..., Any] | None
    names: Mapping[str, Any] = field(default_factory=dict)


def _summing(module: Any, **arguments: Any) -> Any:
    """Add gradients up instead of averaging them."""
    made = fastsync.fully_shard(module, **arguments)
    for each in [made] if isinstance(made, nn.Module) else made:
        cast(Any, each).set_gradient_divide_factor(1.0)
    return made


_REGISTER = fastsync.register_fsdp_forward_method
_SHARE = getattr(fastsync, "share_comm_ctx", None)

WRAPPERS = {
    "torch": Wrapper(
        torch.distributed.fsdp.fully_shard,
        cast(Any, torch.distributed.fsdp.fully_shard).state,
        torch.distributed.fsdp.register_fsdp_forward_method,
        getattr(torch.distributed.fsdp, "share_comm_ctx", None),
    ),
    "fastsync": Wrapper(fastsync.fully_shard, peek, _REGISTER, _SHARE, PEEKED),
    "broken-sum": Wrapper(_summing, peek, _REGISTER, _SHARE, PEEKED),
}


class Suite:
    """Wrapper that rewritten tests build with; counts how often they do."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.built = 0
        self.fully_shard = _FullyShard(self)
        cast(Any, common_fsdp).fully_shard = self.fully_shard  # models of torch's, too
        if wrapper.state is peek:
            let_modules_peek()


class _FullyShard:
    """`fully_shard` of the implementation under test."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self.state = suite.wrapper.state

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self._suite.built += 1
        note_modules(module)
        return self._suite.wrapper.fully_shard(module, *args, **kwargs)
