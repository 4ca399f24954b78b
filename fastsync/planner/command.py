"""Plans a training before it is launched: memory, step time, and the strategy to take.

    python -m fastsync.plan --model train.py:build_model --batch 8x1024 --gpus 64 --device h100
    python -m fastsync.plan --params 70e9 --dtype bf16 --gpus 8      # the arithmetic alone
    python -m fastsync.plan --from run.json --gpus 8,64,512,4096     # from a recorded timeline
    python -m fastsync.plan --from run.json --model train.py:build_model --batch 8x1024
    torchrun --nproc-per-node 2 -m fastsync.plan --measure profile.json
    torchrun ... -m fastsync.plan --measure profile.json --model train.py:build_model --batch 8x1024

--model names a function without arguments that returns the nn.Module; it is built and traced
without memory. --batch is one rank's: samples x tokens, or samples x the sizes of a sample.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastsync.planner import quantities as q
from fastsync.planner.arithmetic import held_rows
from fastsync.planner.asked import cluster_of, device_of, profile_of, scenario_of, training_of
from fastsync.planner.checks import check_ranks, wants_own_step, wants_time
from fastsync.planner.held import held_by
from fastsync.planner.own_step import with_step
from fastsync.planner.plan import Plan, make_plan_of
from fastsync.planner.recorded import recorded_plan
from fastsync.planner.views import held_json, held_text, html_page, plan_json, plan_text
from fastsync.wire.formats import make_codec

__all__ = ["main"]

_USAGE = 2
_KINDS = ("0", "1", "2", "3", "hsdp")
T = TypeVar("T")


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse, which then names the option in what is wrong."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _choices(text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if known is not None and name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return names


def _wires(text: str) -> tuple[str, ...]:
    names = _choices(text)
    for name in names:
        make_codec(name)
    return names


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
        "--from",
        dest="run",
        type=Path,
        help="a timeline that FastDDP has recorded, with --model of that model",
    )
    what("--batch", type=_typed(q.shape), help="of one rank: 8x1024 tokens, 32x3x224x224")
    what("--loss", help="file.py:function of output and batch (default: by the output's form)")
    what("--dtype", type=_typed(q.dtype), help="of parameters: fp32, bf16, fp16")
    what("--optimizer", default="adamw", help="of torch.optim, with --model (default: adamw)")
    what("--master-weights", action="store_true", help="fp32 masters of 16-bit parameters")
    what("--accumulate", type=_typed(q.whole), default=1, help="backwards per step")
    where = parser.add_argument_group("where").add_argument
    where("--gpus", type=_typed(q.worlds), default=(8,), help="ranks: 64, or 8,64,512")
    where("--per-node", type=_typed(q.whole), default=8, help="ranks of a node (default: 8)")
    where("--device", default=None, help="v100, a100, a100-40, h100, h200, b200, cpu")
    where("--memory", type=_typed(q.nbytes), help="of a rank, instead of the device's: 80GB")
    where("--efficiency", type=_typed(q.ratio), help="share of its peak that matmuls reach")
    where("--intra", type=_typed(q.rate), help="a rank's link inside a node: 450GB/s")
    where("--inter", type=_typed(q.rate), help="a rank's link between nodes: 50GB/s, 10Gbit/s")
    where("--latency", type=_typed(q.seconds), help="of a hop, instead of NCCL's tables: 20us")
    where("--backend", choices=("nccl", "gloo"), help="default: nccl, on a cpu gloo")
    where("--profile", type=Path, help="what --measure has written: device, links")
    where(
        "--jitter",
        type=_typed(q.spread),
        default=0.0,
        help="spread of ranks' speeds, 0.02 for 2 %%",
    )
    where(
        "--straggler",
        type=_typed(q.factor),
        default=1.0,
        help="one rank always takes so many times as long: 1.2",
    )
    what = parser.add_argument_group("what is tried").add_argument
    what("--strategies", type=_typed(partial(_choices, known=_KINDS)), default=_KINDS)
    what("--wires", type=_typed(_wires), default=("fp32",), help="of gradients: fp32,bf16,int8")
    what("--bucket-cap-mb", type=float, help="as FastDDP's")
    what("--no-checkpointing", action="store_true", help="do not try to recompute blocks")
    out = parser.add_argument_group("what is written").add_argument
    out("--json", type=Path, help="the plan for programs")
    out("--html", type=Path, help="a page with pictures")
    out("--quiet", action="store_true", help="print nothing")
    out("--measure", type=Path, help="under torchrun: measure these ranks, write a profile")
    return parser


def _plan(args: argparse.Namespace) -> Plan:
    if args.run is not None:
        return recorded_plan(args)
    profile = profile_of(args)
    device = device_of(args, profile)
    asked = scenario_of(args, device, cluster_of(args, device, profile))
    sources = () if profile is None else (f"profile: {profile}",)
    if profile is not None and profile.step is not None and args.model:
        made = with_step(asked.compute, asked.first, args.optimizer, profile.step)
        asked, sources = replace(asked, measured=made[0]), (*sources, *filter(None, made[1:]))
    return replace(make_plan_of(asked, args.gpus), sources=sources)


def _arithmetic(args: argparse.Namespace) -> None:
    """The formulas' tables, one for each number of ranks."""
    itemsize = (args.dtype or q.DTYPES["bf16"]).itemsize
    held = held_by(itemsize, 8.0, args.master_weights)
    states = "Adam's states in fp32" + (", fp32 master weights" if held.master else "")
    title = f"{q.millions(args.params)} parameters of {itemsize} bytes, {states}"
    tables = {
        world: held_rows(args.params, held, world, args.per_node, args.strategies)
        for world in args.gpus
    }
    if not args.quiet:
        print(held_text(title, tables))
    if args.json:
        _write_json(args, held_json(title, tables))


def _write_json(args: argparse.Namespace, document: object) -> None:
    _write(args.json, json.dumps(document, indent=1) + "\n", "--json", args.quiet)


def _write(path: Path, text: str, option: str, quiet: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}") from error
    if not quiet:
        print(f"wrote {path}")


def _run(args: argparse.Namespace, given: Collection[str]) -> None:
    if args.measure is not None:
        from fastsync.planner.measure import measure_to

        measure_to(args.measure, training_of(args) if wants_own_step(args, given) else None)
        return
    timed = wants_time(args, given)
    check_ranks(args, timed)
    if not timed:
        _arithmetic(args)
        return
    plan = _plan(args)
    if not args.quiet:
        print(plan_text(plan))
    if args.json:
        _write_json(args, plan_json(plan))
    if args.html:
        _write(args.html, html_page(plan), "--html", args.quiet)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    try:
        _run(args, given)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    return 0
