"""The ways to synchronise gradients that are compared, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from examples.common.ranks import UsageError
from fastsync import FastDDP, Wire
from fastsync.config.arguments import grouped
from fastsync.wire.formats import wire_formats

BASELINE, FLOOR, OURS = "ddp", "no_sync", "fastsync"

# A module on its device, and that device -> the module to train.
Wrap = Callable[[nn.Module, torch.device], nn.Module]

# Of each wire format: bits per fp32 element, scales and padding left aside (None where that depends
# on the gradient), and the accepted distance of the weights from those of default DDP, relative to
# the distance that training moved them (0 for the same values).
WIRE_COSTS: dict[str, tuple[float | None, float]] = {
    "fp32": (32.0, 0.0),
    "bf16": (16.0, 0.03),
    "fp16": (16.0, 0.01),
    "fp8_e4m3": (8.0, 0.1),
    "fp8_e5m2": (8.0, 0.2),
    "int8": (8.0, 0.05),
    "int4": (4.0, 0.5),
}
# Formats that send a part of the gradient, and the rest in later steps, have not come far after a
# few: this only tells that their weights do not run away.
UNKNOWN_WIRE = (None, 2.0)


@dataclass(frozen=True)
class Variant:
    """One way to wrap a model; see WIRE_COSTS for its `bits` and `tolerance`.

    Attributes:
        wire: the wire format of fastsync's variants; None for torch's.
        by_name: runs where it is asked for, and is none of "all".
    """

    name: str
    wrap: Wrap
    bits: float | None = 32.0
    tolerance: float = 0.0
    wire: str | None = None
    by_name: bool = False

    @property
    def lossy(self) -> bool:
        """Return whether gradients lose bits on their way."""
        return self.tolerance > 0.0


def _wrapper(kind: type[DistributedDataParallel], **options: Any) -> Wrap:
    def wrap(module: nn.Module, device: torch.device) -> DistributedDataParallel:
        device_ids = None if device.type == "cpu" else [torch.cuda.current_device()]
        return kind(module, device_ids=device_ids, **options)

    return wrap


ddp = partial(_wrapper, DistributedDataParallel)  # called with its options


def fast_ddp(**settings: Any) -> Wrap:
    """Wrap in FastDDP with settings named one by one, as for `python -m fastsync.run`."""
    return _wrapper(FastDDP, **grouped(settings))


def hooked(wrap: Wrap, hook: Callable[..., Any]) -> Wrap:
    """Return the same with a communication hook that keeps no state."""

    def wrap_and_register(module: nn.Module, device: torch.device) -> nn.Module:
        model: Any = wrap(module, device)
        model.register_comm_hook(None, hook)
        return model  # type: ignore[no-any-return]

    return wrap_and_register


def weighted(wrap: Wrap) -> Wrap:
    """Return the same with a weight for every forward, all alike."""

    def weigh(model: Any, inputs: object) -> None:
        if torch.is_grad_enabled():
            model.add_weight(1.0)

    def wrap_and_weigh(module: nn.Module, device: torch.device) -> nn.Module:
        model = wrap(module, device)
        model.register_forward_pre_hook(weigh)
        return model

    return wrap_and_weigh


def _fastsync(wire: str, stage: int = 0) -> Variant:
    """FastDDP with `wire` and `zero`."""
    name = OURS + (f"_zero{stage}" if stage else "") + ("" if wire == "fp32" else f"_{wire}")
    cost, wrap = WIRE_COSTS.get(wire, UNKNOWN_WIRE), fast_ddp(wire=wire, zero=stage)
    return Variant(name, wrap, *cost, wire=wire, by_name=stage > 0)


def _in_nodes(suffix: str, wire: str, **options: Any) -> Variant:
    """FastDDP in the hierarchical form."""
    wrap = fast_ddp(wire=Wire(wire, form="hierarchical"), **options)
    return Variant(f"{OURS}_nodes{suffix}", wrap, None, WIRE_COSTS[wire][1], by_name=True)


_VIEW, _BATCHED = {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}
_VARIANTS = (
    Variant(FLOOR, lambda module, device: module),
    Variant(BASELINE, ddp()),
    Variant("ddp_view", ddp(**_VIEW)),
    Variant("ddp_batched", ddp(**_BATCHED)),
    Variant("ddp_batched_view", ddp(**_BATCHED, **_VIEW)),
    Variant("ddp_static_view", ddp(static_graph=True, **_VIEW)),
    Variant("ddp_fp16", hooked(ddp(), fp16_compress_hook), *WIRE_COSTS["fp16"]),
    _fastsync("fp32"),
    Variant(f"{OURS}_group", fast_ddp(shared_memory=False), by_name=True),
    Variant(f"{OURS}_weights", weighted(fast_ddp()), by_name=True),
    *(_fastsync(wire) for wire in wire_formats() if wire != "fp32"),
    _in_nodes("", "fp32"),
    _in_nodes("_group", "fp32", shared_memory=False),
    _in_nodes("_int8", "int8"),
    *(_fastsync(wire, stage) for wire in ("fp32", "int8") for stage in (1, 2)),
)
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _VARIANTS}
# Why variants cannot run here.
UNAVAILABLE = {
    name: f"batched_grad_copy needs torch >= 2.13, this is {torch.__version__}"
    for name in ("ddp_batched", "ddp_batched_view")
    if "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters
}


def available(*names: str) -> str:
    """Return those of `names` that can run here, in the form that `select` takes: for defaults."""
    return ",".join(name for name in names if name not in UNAVAILABLE)


@dataclass(frozen=True)
class Selection:
    """The variants to run, and why others of those asked for cannot."""

    variants: tuple[Variant, ...]
    skipped: dict[str, str]


def select(names: str, required: Iterable[str] = ()) -> Selection:
    """Parse a comma-separated list of variants.

    Args:
        names: "all" among them takes every usual one that can run here and skips the others.
        required: variants to add where they were not named.

    Raises:
        UsageError: a name is unknown, or a variant asked for by name cannot run here.
    """
    named = {name.strip() for name in names.split(",")}
    usual = {name for name, variant in VARIANTS.items() if "all" in named and not variant.by_name}
    named = (named - {"all"}) | set(required)
    unknown = named - set(VARIANTS)
    if unknown:
        raise UsageError(f"unknown wrapper {sorted(unknown)}; expects one of {', '.join(VARIANTS)}")
    if named & set(UNAVAILABLE):
        reasons = (f"{name}: {UNAVAILABLE[name]}" for name in sorted(named & set(UNAVAILABLE)))
        raise UsageError("; ".join(reasons))
    wanted = named | usual
    skipped = {name: reason for name, reason in UNAVAILABLE.items() if name in wanted}
    kept = (v for name, v in VARIANTS.items() if name in wanted - set(skipped))
    return Selection(tuple(kept), skipped)
