"""FastDDP with given options, in place of DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastsync._build.env import Env, ask_to_replace
from fastsync._torch import caller
from fastsync.config.arguments import grouped
from fastsync.ddp.fast_ddp import FastDDP

__all__ = ["configured", "is_replaced", "replace_ddp", "replace_where_asked"]


def _blank(kind: type[FastDDP] = FastDDP) -> FastDDP:
    return kind.__new__(kind)


def configured(
    options: Mapping[str, Any], wrapped: Callable[[FastDDP], None] | None = None
) -> type[FastDDP]:
    """Return FastDDP with `options`, which win over those that it is called with.

    Models of the class are copied and pickled as models of FastDDP. It derives from the class of
    the stage that `options` ask for: code that calls it does not pass `zero`, so that FastDDP's
    constructor could not choose.

    Args:
        wrapped: called with each model that is made.
    """

    base: Any = FastDDP.class_for(options.get("zero", 0))

    class Configured(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, **options})
            if wrapped is not None:
                wrapped(self)

        def __reduce_ex__(self, protocol: Any) -> Any:
            made, arguments, *rest = cast(Any, super().__reduce_ex__(protocol))
            return (
                (_blank, (base,), *rest) if type(self) is Configured else (made, arguments, *rest)
            )

    return Configured


def is_replaced() -> bool:
    """Return whether `replace_ddp` has been called in this process."""
    return "__new__" in vars(DistributedDataParallel)


def replace_ddp(**options: Any) -> None:
    """Make every DistributedDataParallel that this process builds from now on a FastDDP.

    That holds for code that has imported the class by its name, too. Classes of the user that
    derive from it follow where they are defined later. Rank 0 prints a line for each place that
    wraps a module.

    Args:
        options: arguments of FastDDP; they win over those that the code passes.

    Raises:
        RuntimeError: it has been replaced already.
    """
    if is_replaced():
        raise RuntimeError(
            "DistributedDataParallel has been replaced by FastDDP already in this process; ask for "
            "it once, with all options, by FASTSYNC_REPLACE_DDP or by python -m fastsync.run"
        )
    told: set[str] = set()

    def tell(model: FastDDP) -> None:
        where = caller()
        if model.process_group.rank() == 0 and where not in told:
            told.add(where)
            print(_describe(model.module, where, options), file=sys.stderr, flush=True)

    replacement = configured(options, tell)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(replacement if cls is DistributedDataParallel else cls)

    DistributedDataParallel.__new__ = new  # type: ignore[method-assign]
    nn.parallel.DistributedDataParallel = replacement  # type: ignore[misc]


def _describe(module: nn.Module, where: str, options: dict[str, Any]) -> str:
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return (
        f"fastsync: {type(module).__name__}, wrapped at {where}, uses FastDDP({shown}) in place of "
        "DistributedDataParallel"
    )


def replace_where_asked() -> None:
    """Do what the environment variable FASTSYNC_REPLACE_DDP asks for, here and in children."""
    options = Env.read().replace_ddp
    if options is not None and not is_replaced():
        replace_ddp(**grouped(options))
        ask_to_replace()
