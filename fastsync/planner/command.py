"""Plans a training before it is launched: memory, step time, and the strategy to take.

    python -m fastsync.plan --model train.py:build_model --batch 8x1024 --gpus 64 --device h100
    python -m fastsync.plan --params 70e9 --dtype bf16 --gpus 8,64,512  # a transformer so large
    python -m fastsync.plan --model train.py:build_model --batch 8x1024 --computing 61ms

--model names a function without arguments that returns the nn.Module; it is built and traced
without memory. --batch is one rank's: samples x tokens, or samples x the sizes of a sample.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from fastsync.config.sync_modes import DiLoCo, SyncMode, sync_mode
from fastsync.planner import quantities as q
from fastsync.planner.formulas import adam_by_formula, transformer_of
from fastsync.planner.hardware import Cluster, Device, device_named, links_of
from fastsync.planner.plan import plan_text
from fastsync.planner.record import Allocations, Record
from fastsync.planner.scenario import Scenario, cached_optimizer
from fastsync.planner.trace import Loss, TraceError, trace_model, trace_optimizer
from fastsync.wire.formats import make_codec

_USAGE = 2
_BY_FORMULA = ("adam", "adamw")
_BATCH = (1, 4096)  # of --params: samples x tokens
T = TypeVar("T")


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a type for argparse, which then names the option in its errors."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _wires(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        make_codec(name)
    return names


def _modes(text: str) -> tuple[SyncMode, ...]:
    return tuple(mode for part in text.split(",") if (mode := sync_mode(part.strip())))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is trained").add_argument
    what("--model", help="file.py:function or package.module:function that returns the model")
    what("--params", type=_typed(q.count), help="a transformer of so many parameters: 70e9, 7B")
    what(
        "--batch",
        type=_typed(q.shape),
        help="of one rank: 8x1024 tokens, 32x3x224x224 (with --params: 1x4096)",
    )
    what("--loss", help="file.py:function of output and batch (default: by the output's form)")
    what("--dtype", type=_typed(q.dtype), help="of parameters: fp32, bf16, fp16")
    what("--optimizer", default="adamw", help="of torch.optim, with --model (default: adamw)")
    what("--master-weights", action="store_true", help="fp32 masters of 16-bit parameters")
    what("--accumulate", type=_typed(q.whole), default=1, help="backwards per step")
    what("--wires", type=_typed(_wires), default=("fp32",), help="of gradients: fp32,bf16,int8")
    what("--sync", type=_typed(_modes), default=(), help="average now and then: diloco:64,local:8")
    where = parser.add_argument_group("where").add_argument
    where("--gpus", type=_typed(q.worlds), default=(8,), help="ranks: 64, or 8,64,512")
    where("--per-node", type=_typed(q.whole), default=8, help="ranks of a node (default: 8)")
    where("--device", default="h100", help="v100, a100, a100-40, h100, h200, b200, cpu")
    where("--memory", type=_typed(q.nbytes), help="of a rank, instead of the device's: 80GB")
    where("--efficiency", type=_typed(q.ratio), help="share of its peak that matmuls reach")
    where("--computing", type=_typed(q.seconds), help="of forward and backward, measured: 61ms")
    where("--intra", type=_typed(q.rate), help="a rank's link inside a node: 450GB/s")
    where("--inter", type=_typed(q.rate), help="a rank's link between nodes: 50GB/s, 10Gbit/s")
    where("--latency", type=_typed(q.seconds), help="of a hop, instead of NCCL's tables: 20us")
    where("--backend", choices=("nccl", "gloo"), help="default: nccl, on a cpu gloo")
    where("--jitter", type=_typed(q.ratio), default=0.0, help="spread of ranks' speeds: 2%%")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Check that options go together; what does not is an error that names the option.

    Raises:
        ValueError: it is unclear what is trained, an option would change nothing, or ranks do not
            fill nodes.
    """
    if (args.model is None) == (args.params is None):
        raise ValueError("say what is trained: --model or --params, one of them")
    if args.model and not args.batch:
        raise ValueError("--model needs --batch, the sizes of one rank's input: --batch 8x1024")
    if args.params and args.batch and len(args.batch) != 2:
        raise ValueError("--batch with --params is samples x tokens: --batch 8x1024")
    if args.params and args.loss:
        raise ValueError("--loss says nothing with --params; plan your own model with --model")
    if args.params and args.optimizer.lower() not in _BY_FORMULA:
        raise ValueError(
            f"--optimizer {args.optimizer} says nothing with --params, where states are Adam's by "
            "formula; plan your own model with --model"
        )
    wrong = next((n for n in args.gpus if n > args.per_node and n % args.per_node), None)
    if wrong:
        raise ValueError(
            f"--gpus: {wrong} do not fill nodes of {args.per_node}; choose a multiple of --per-node"
        )


def _asked_for(args: argparse.Namespace) -> Scenario:
    """Return the training that options ask for.

    Raises:
        ValueError: it names the option that is wrong.
    """
    _check(args)
    device = device_named(args.device)
    if args.memory:
        device = replace(device, memory=args.memory)
    if args.efficiency:
        device = replace(device, efficiency=args.efficiency)
    backend = args.backend or ("gloo" if device.on_cpu else "nccl")
    intra, inter = links_of(device, backend, args.latency)
    if args.intra:
        intra = replace(intra, rate=args.intra)
    if args.inter:
        inter = replace(inter, rate=args.inter)
    cluster = Cluster(args.gpus[0], args.per_node, intra, inter, backend)
    scenario = _scenario(args, device, cluster)
    if args.computing is None:
        return scenario
    return replace(scenario, measured=scenario.compute().lasting(args.computing))


class _OptionError(TraceError):
    """An error whose text names the option."""


def _imported(name: str, option: str) -> Callable[..., object]:
    """Return the function that an option names.

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
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(path.parent))
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(place)
    except Exception as error:
        raise ValueError(
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
    """Return the function that --loss names, whose errors name it."""
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


def _tracer(args: argparse.Namespace) -> Callable[[int, bool], Record]:
    """Return what traces --model, or a transformer of --params."""
    sizes: tuple[int, ...] = (args.batch or _BATCH)[1:]
    if args.params:
        dtype = args.dtype or torch.bfloat16
        return lambda samples, again: transformer_of(args.params, dtype, (samples, *sizes), again)
    build, loss = _build(args.model), _loss_of(args.loss)

    def trace(samples: int, checkpointing: bool) -> Record:
        if sys.stderr.isatty():
            print(f"tracing {args.model}, {samples} samples ...", file=sys.stderr, flush=True)
        options = {"loss": loss, "dtype": args.dtype, "checkpointing": checkpointing}
        try:
            return trace_model(build, (samples, *sizes), **options)
        except _OptionError:
            raise
        except TraceError as error:
            batch = "x".join(map(str, (samples, *sizes)))
            raise ValueError(f"--model {args.model} with --batch {batch}: {error}") from error

    return trace


def _scenario(args: argparse.Namespace, device: Device, cluster: Cluster) -> Scenario:
    def optimizer(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> Allocations:
        try:
            return trace_optimizer(args.optimizer, shapes, foreach=not device.on_cpu)
        except TraceError as error:
            raise ValueError(f"--optimizer {args.optimizer}: {error}") from error

    return Scenario(
        trace=_tracer(args),
        samples=(args.batch or _BATCH)[0],
        optimizer=cached_optimizer(adam_by_formula if args.params else optimizer),
        device=device,
        cluster=cluster,
        wires=args.wires,
        accumulate=args.accumulate,
        masters=args.master_weights,
        jitter=args.jitter,
        modes=[
            replace(mode, wire=wire) if isinstance(mode, DiLoCo) else mode
            for mode in args.sync
            for wire in (args.wires if isinstance(mode, DiLoCo) else args.wires[:1])
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        print(plan_text(_asked_for(args), args.gpus))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    return 0
