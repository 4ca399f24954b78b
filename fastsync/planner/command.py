"""Plans a training before it is launched: memory, step time, and the strategy to take.

    python -m fastsync.plan --model train.py:build_model --batch 8x1024 --gpus 64 --device h100
    python -m fastsync.plan --params 70e9 --dtype bf16 --gpus 8,64,512  # a transformer so large
    python -m fastsync.plan --model train.py:build_model --batch 8x1024 --computing 61ms

--model names a function without arguments that returns the nn.Module; it is built and traced
without memory. --batch is one rank's: samples x tokens, or samples x the sizes of a sample.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastsync.config.sync_modes import SyncMode, sync_mode
from fastsync.planner import quantities as q
from fastsync.planner.options import asked_for
from fastsync.planner.plan import plan_text
from fastsync.wire.formats import make_codec

__all__ = ["main"]

_USAGE = 2
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(arguments)
    try:
        print(plan_text(asked_for(args), args.gpus))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    return 0
