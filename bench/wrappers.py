"""The ways to synchronise gradients that benchmarks compare, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.errors import UsageError

BASELINE = "ddp"
FLOOR = "no_sync"


def _always() -> str | None:
    return None


@dataclass(frozen=True)
class WireCost:
    """What a wire format saves, and what it costs.

    Attributes:
        bits: on the wire per fp32 element of the gradient, scales and padding left aside; None
            where that depends on the gradient.
        tolerance: the accepted distance of the weights from those of default DDP, relative to the
            distance that training moved them; 0 for the same values.
    """

    bits: float | None
    tolerance: float


EXACT = WireCost(32.0, 0.0)


@dataclass(frozen=True)
class Variant:
    """One way to wrap a model.

    Attributes:
        name: as given on the command line.
        summary: one line for tables and `--list`.
        wrap: (module on its device, that device) -> the module to train.
        cost: what its wire format saves and costs.
        unavailable: the reason why this variant cannot run here, or None.
        wire: the wire format of fastsync's variants; None for torch's.
        takes_sparse: whether it can reduce sparse gradients.
    """

    name: str
    summary: str
    wrap: Callable[[nn.Module, torch.device], nn.Module]
    cost: WireCost = EXACT
    unavailable: Callable[[], str | None] = field(default=_always)
    wire: str | None = None
    takes_sparse: bool = True

    @property
    def lossy(self) -> bool:
        """Whether gradients lose bits on their way."""
        return self.tolerance > 0.0

    @property
    def tolerance(self) -> float:
        """See WireCost."""
        return self.cost.tolerance


def _device_ids(device: torch.device) -> list[int] | None:
    return None if device.type == "cpu" else [torch.cuda.current_device()]


def _bare(module: nn.Module, device: torch.device) -> nn.Module:
    return module


def _ddp(**options: Any) -> Callable[[nn.Module, torch.device], nn.Module]:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        return DistributedDataParallel(module, device_ids=_device_ids(device), **options)

    return wrap


def _ddp_fp16(module: nn.Module, device: torch.device) -> nn.Module:
    wrapped = DistributedDataParallel(module, device_ids=_device_ids(device))
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _fastsync(wire: str) -> Callable[[nn.Module, torch.device], nn.Module]:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        from fastsync import FastDDP  # here, so that torch's variants run without an extension

        wrapped: nn.Module = FastDDP(module, device_ids=_device_ids(device), wire=wire)
        return wrapped

    return wrap


def _lacks_batched() -> str | None:
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        return None
    return f"batched_grad_copy needs torch >= 2.13, this is {torch.__version__}"


def _is_fastsync(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] == "fastsync"


def _lacks_fastsync() -> str | None:
    """Only an absent package counts: one that fails to build or load must be seen to fail."""
    try:
        from fastsync import FastDDP  # noqa: F401
    except ModuleNotFoundError as error:
        if not _is_fastsync(error):
            raise
        return "package fastsync is not importable (run from the checkout, or `make install`)"
    return None


_TORCH_VARIANTS = (
    Variant(FLOOR, "the bare module: the floor", _bare),
    Variant(BASELINE, "torch DDP, defaults", _ddp()),
    Variant("ddp_view", "gradient_as_bucket_view", _ddp(gradient_as_bucket_view=True)),
    Variant(
        "ddp_batched",
        "batched_grad_copy",
        _ddp(batched_grad_copy=True),
        unavailable=_lacks_batched,
    ),
    Variant(
        "ddp_batched_view",
        "batched_grad_copy + gradient_as_bucket_view",
        _ddp(batched_grad_copy=True, gradient_as_bucket_view=True),
        unavailable=_lacks_batched,
    ),
    Variant(
        "ddp_static_view",
        "static_graph + gradient_as_bucket_view",
        _ddp(static_graph=True, gradient_as_bucket_view=True),
    ),
    Variant(
        "ddp_fp16",
        "torch's fp16_compress_hook",
        _ddp_fp16,
        WireCost(16.0, 0.01),
        takes_sparse=False,  # the hook divides, which torch has not for sparse halves
    ),
)

# What is known of wire formats; one that is not listed is held to UNKNOWN_WIRE.
WIRE_COSTS = {
    "fp32": EXACT,
    "bf16": WireCost(16.0, 0.03),
    "fp16": WireCost(16.0, 0.01),
    "fp8_e4m3": WireCost(8.0, 0.1),
    "fp8_e5m2": WireCost(8.0, 0.2),
    "int8": WireCost(8.0, 0.05),
    "int4": WireCost(4.0, 0.5),
}
# Formats that send a part of the gradient, and the rest in later steps, have not come far after a
# few: this only tells that their weights do not run away.
UNKNOWN_WIRE = WireCost(None, 2.0)


def wire_formats() -> tuple[str, ...]:
    """The names that FastDDP accepts as `wire`; without the package, those it is known to."""
    try:
        from fastsync.wire import formats
    except ModuleNotFoundError as error:
        if not _is_fastsync(error):
            raise
        return ("fp32", "bf16", "fp16")
    return formats.wire_formats()


def fastsync_name(wire: str) -> str:
    """The name of the variant that is FastDDP with `wire`."""
    return "fastsync" if wire == "fp32" else f"fastsync_{wire}"


def _fastsync_variant(wire: str) -> Variant:
    return Variant(
        fastsync_name(wire),
        "FastDDP" if wire == "fp32" else f"FastDDP, wire={wire!r}",
        _fastsync(wire),
        WIRE_COSTS.get(wire, UNKNOWN_WIRE),
        unavailable=_lacks_fastsync,
        wire=wire,
    )


_VARIANTS = (*_TORCH_VARIANTS, *(_fastsync_variant(wire) for wire in wire_formats()))
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _VARIANTS}


def available(*names: str) -> str:
    """Those of `names` that can run here, as `select` takes them: for defaults."""
    return ",".join(name for name in names if VARIANTS[name].unavailable() is None)


@dataclass(frozen=True)
class Selection:
    """The variants to run, and why others of those asked for cannot."""

    variants: tuple[Variant, ...]
    skipped: dict[str, str]


def select(names: str, required: Iterable[str] = ()) -> Selection:
    """Parses a comma-separated list of variants, or "all".

    Args:
        names: "all" takes every variant that can run here and skips the others.
        required: variants to add where they were not named.

    Raises:
        UsageError: a name is unknown, or a variant asked for by name cannot run here.
    """
    everything = names == "all"
    wanted = set(VARIANTS) if everything else {name.strip() for name in names.split(",")}
    unknown = wanted - set(VARIANTS)
    if unknown:
        raise UsageError(f"unknown wrapper {sorted(unknown)}; expects one of {', '.join(VARIANTS)}")
    ordered = [variant for name, variant in VARIANTS.items() if name in wanted | set(required)]
    reasons = {variant.name: variant.unavailable() for variant in ordered}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    if skipped and not everything:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    return Selection(tuple(v for v in ordered if v.name not in skipped), skipped)
