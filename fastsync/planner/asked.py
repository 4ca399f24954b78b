"""From options to what they mean: the model, the device, the cluster."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from fastsync.plan.policy import BucketPolicy
from fastsync.planner.devices import DEVICES, Device, device_named, kind_of_gpu
from fastsync.planner.links import Cluster, Link
from fastsync.planner.own_step import Training
from fastsync.planner.profile import Profile
from fastsync.planner.record import Record
from fastsync.planner.scenario import Scenario, cached_optimizer
from fastsync.planner.synthetic import adam_by_formula, transformer_of
from fastsync.planner.tracing import (
    BuiltOnce,
    Loss,
    StepError,
    TraceError,
    kind_of_optimizer,
    trace_model,
    trace_optimizer,
)

__all__ = ["cluster_of", "device_of", "profile_of", "scenario_of"]

# What a rank's links carry by the makers, and the shares of it that NCCL counts on in its own
# tables: 370 of 450 GB/s on an H100, 240 of 300 on an A100; networks come closer.
_INTRA = {
    "v100": 150e9,
    "a100": 300e9,
    "a100-40": 300e9,
    "h100": 450e9,
    "h200": 450e9,
    "b200": 900e9,
}
_INTER = {"v100": 12.5e9, "a100": 25e9, "a100-40": 25e9}
_NVLINK_REACH, _NET_REACH = 0.82, 0.92
_LOCAL, _SLOW = 1e9, 1.25e9  # Gloo inside a machine; 10 Gbit/s
_TCP_LATENCY = 50e-6


def profile_of(args: argparse.Namespace) -> Profile | None:
    """What --profile names.

    Raises:
        ValueError: it cannot be read, or is of another machine or backend than is asked for.
    """
    if args.profile is None:
        return None
    try:
        profile = Profile.load(args.profile)
    except OSError as error:
        raise ValueError(f"--profile: {args.profile} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--profile: {error}") from error
    kind = _kind_of(profile)
    if args.device and device_named(args.device).name != kind:
        raise ValueError(
            f"--profile {args.profile} was measured on {profile}, which is no --device "
            f"{args.device}; leave --device out, or measure there with --measure"
        )
    if args.backend and args.backend != profile.backend:
        raise ValueError(
            f"--profile {args.profile} was measured on {profile}, not over --backend "
            f"{args.backend}; leave --backend and --device out, or measure there with --measure"
        )
    return profile


def _kind_of(profile: Profile) -> str | None:
    """The --device that it was measured on; None: one that no data sheet here is of."""
    machine = profile.machine
    return kind_of_gpu(machine.gpu, machine.memory) if machine.gpu else "cpu"


def device_of(args: argparse.Namespace, profile: Profile | None, default: str = "h100") -> Device:
    """The device, with what the user knows better.

    Args:
        default: the one that is taken where none is named or measured.

    Raises:
        ValueError: there is no such device.
    """
    device = device_named(args.device or default) if profile is None else _measured(profile)
    if args.memory:
        device = replace(device, memory=args.memory)
    if args.efficiency:
        device = replace(device, efficiency=args.efficiency)
    return device


def _measured(profile: Profile) -> Device:
    rates, machine = profile.device, profile.machine
    kind = _kind_of(profile)
    sheet = device_named(kind) if kind else DEVICES["h100"]
    return replace(
        sheet,
        name=sheet.name if kind else machine.gpu,
        narrow=rates.flops,
        wide=rates.flops,
        bandwidth=rates.bandwidth,
        memory=machine.memory or sheet.memory,
        efficiency=1.0,
        streaming=1.0,
        overhead=rates.overhead,
        sending=rates.sending,
        launching=rates.launching,
        handling=rates.handling,
        coding=rates.coding,
    )


def cluster_of(args: argparse.Namespace, device: Device, profile: Profile | None) -> Cluster:
    """Ranks and links; what is not given follows from the device.

    Raises:
        ValueError: the GPUs do not fill nodes, or the profile lacks links.
    """
    backend = args.backend or ("gloo" if device.on_cpu else "nccl")
    world, per_node = args.gpus[0], args.per_node
    if profile is not None:
        return _profiled(args, profile)
    on_tcp = backend == "gloo"
    latency = args.latency if args.latency is not None else (_TCP_LATENCY if on_tcp else None)
    intra = Link(
        args.intra or _INTRA.get(device.name, _LOCAL),
        latency,
        "nvlink",
        1.0 if on_tcp else _NVLINK_REACH,
    )
    fast = _INTER.get(device.name, 50e9)
    inter = Link(
        args.inter or (_SLOW if on_tcp else fast), latency, "net", 1.0 if on_tcp else _NET_REACH
    )
    return Cluster(world, per_node, intra, inter, backend)


def _profiled(args: argparse.Namespace, profile: Profile) -> Cluster:
    """Measured links; --intra and --inter replace those that they name.

    Raises:
        ValueError: a class of links is needed that nobody has measured.
    """
    world, per_node = args.gpus[0], args.per_node
    several, shared = max(args.gpus) > per_node, per_node > 1
    links = []
    for rate, rates, option, needed, where in (
        (args.intra, profile.inside, "--intra", shared, "inside a machine"),
        (args.inter, profile.between, "--inter", several, "between machines"),
    ):
        if rate is None and rates is None and needed:
            raise ValueError(
                f"--profile: {args.profile} has no links {where}, which {max(args.gpus)} ranks "
                f"with --per-node {per_node} need; measure on such ranks, or give {option}"
            )
        known = rates or profile.inside or profile.between
        assert known is not None
        link = known.link(profile.backend)
        link = link if rate is None else Link(rate, link.latency, "net")
        links.append(link if args.latency is None else replace(link, latency=args.latency))
    intra, inter = links
    return Cluster(world, per_node, intra, inter, profile.backend)


class _OptionError(TraceError):
    """Says itself which option is wrong."""


def _imported(name: str, option: str) -> Callable[..., object]:
    """The function that an option names.

    Raises:
        ValueError: there is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"{option} {name!r} must be file.py:function or package.module:function")
    try:
        if place.endswith(".py"):
            path = Path(place).resolve()
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise _OptionError(f"{option}: there is no file {place}")
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(path.parent))
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(place)
    except _OptionError:
        raise
    except Exception as error:
        raise _OptionError(
            f"{option}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{option}: {place} has no function {attribute!r}")
    return cast(Callable[..., object], function)


def _build(name: str) -> Callable[[], nn.Module]:
    function = _imported(name, "--model")

    def build() -> nn.Module:
        module = function()
        if not isinstance(module, nn.Module):
            raise _OptionError(f"--model {name}: returned a {type(module).__name__}, no nn.Module")
        return module

    return build


def _loss_of(name: str | None) -> Loss | None:
    """The function that --loss names, whose errors name it."""
    if name is None:
        return None
    function = _imported(name, "--loss")

    def loss(output: object, batch: torch.Tensor) -> torch.Tensor:
        try:
            value = function(output, batch)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise _OptionError(f"--loss {name}: {type(error).__name__}: {first}") from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise _OptionError(f"--loss {name} returned no number that has a gradient")
        return value

    return loss


def training_of(args: argparse.Namespace) -> Training:
    """What --model asks to be measured.

    Raises:
        ValueError: there is no such model, loss or optimizer.
    """
    try:
        kind_of_optimizer(args.optimizer)
    except TraceError as error:
        raise ValueError(f"--optimizer {args.optimizer}: {error}") from error
    build, loss = _build(args.model), _loss_of(args.loss)
    return Training(args.model, build, args.batch, loss, args.dtype, args.optimizer)


def _progress(args: argparse.Namespace, doing: str) -> None:
    if sys.stderr.isatty() and not args.quiet:
        print(f"{doing} ...", file=sys.stderr, flush=True)


def scenario_of(args: argparse.Namespace, device: Device, cluster: Cluster) -> Scenario:
    """What --model or --params asks for."""
    dtype: torch.dtype | None = args.dtype
    sizes: tuple[int, ...] = args.batch[1:]

    if args.params:

        def trace(samples: int, checkpointing: bool) -> Record:
            chosen = dtype or torch.bfloat16
            return transformer_of(args.params, chosen, (samples, *sizes), checkpointing)

        optimizer = adam_by_formula
    else:
        build = BuiltOnce(_build(args.model))
        loss = _loss_of(args.loss)

        def trace(samples: int, checkpointing: bool) -> Record:
            _progress(args, f"tracing {args.model}, {samples} samples")
            try:
                return trace_model(
                    build,
                    (samples, *sizes),
                    loss=loss,
                    dtype=dtype,
                    checkpointing=checkpointing,
                )
            except _OptionError:
                raise
            except StepError as error:
                typed, traced = ("x".join(map(str, b)) for b in (args.batch, (samples, *sizes)))
                raise ValueError(
                    f"--batch {typed} does not go through --model {args.model}: with {traced}, "
                    f"{error}"
                ) from error
            except TraceError as error:
                raise ValueError(f"--model {args.model}: {error}") from error

        def optimizer(shapes):  # type: ignore[no-untyped-def]
            try:
                return trace_optimizer(args.optimizer, shapes, foreach=not device.on_cpu)
            except TraceError as error:
                raise ValueError(f"--optimizer {args.optimizer}: {error}") from error

    return Scenario(
        trace=trace,
        samples=args.batch[0],
        optimizer=cached_optimizer(optimizer),
        device=device,
        cluster=cluster,
        kinds=args.strategies,
        wires=args.wires,
        checkpointing=(False,) if args.no_checkpointing else (False, True),
        accumulate=args.accumulate,
        masters=args.master_weights,
        jitter=args.jitter,
        straggler=args.straggler,
        buckets=None if args.bucket_cap_mb is None else BucketPolicy.from_mb(args.bucket_cap_mb),
    )
