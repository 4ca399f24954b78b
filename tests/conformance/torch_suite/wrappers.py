"""The classes that the suite can put in place of DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastsync import FastDDP, Wire

__all__ = ["WRAPPERS", "Suite", "SuiteDDP"]


class SuiteDDP(FastDDP):
    """FastDDP, given DDP's defaults where its own differ."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("find_unused_parameters", False)
        kwargs.setdefault("gradient_as_bucket_view", False)
        # Profiles are to show the backend's collectives.
        kwargs.setdefault("wire", Wire(shared_memory=False))
        super().__init__(module, *args, **kwargs)


class NoSync(DistributedDataParallel):
    """Wraps and does nothing else: has no engine, and calls the module alone."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **{**kwargs, "init_sync": False})

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        """Build no engine."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class NoGradientSync(SuiteDDP):
    """Synchronises everything but gradients."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return cast(Any, super()).forward(*inputs, **kwargs)


class SumInsteadOfMean(SuiteDDP):
    """Adds gradients up."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._engine.core.set_divisor(1.0)


class NoInitialBroadcast(SuiteDDP):
    """Lets each rank start from its own parameters."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **{**kwargs, "init_sync": False})


class JoinIgnored(SuiteDDP):
    """A rank that runs out of inputs leaves the others alone."""

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()


class NoSyncIgnored(SuiteDDP):
    """Synchronises under no_sync(), too."""

    def no_sync(self) -> Any:
        return nullcontext()


WRAPPERS: dict[str, type[DistributedDataParallel]] = {
    "ddp": DistributedDataParallel,
    "fastddp": SuiteDDP,
    "broken-no-sync": NoSync,
    "broken-no-gradient-sync": NoGradientSync,
    "broken-sum": SumInsteadOfMean,
    "broken-no-broadcast": NoInitialBroadcast,
    "broken-join": JoinIgnored,
    "broken-no-sync-ignored": NoSyncIgnored,
}


class Suite:
    """Class that rewritten tests see; counts how often they build the class under test."""

    def __init__(self, wrapper: type[DistributedDataParallel]) -> None:
        self.wrapper = wrapper
        self.built = 0

    def build(self, *args: Any, **kwargs: Any) -> DistributedDataParallel:
        """Return an instance of the class under test."""
        self.built += 1
        return self.wrapper(*args, **kwargs)
