"""Runs a program with FastDDP in place of torch's DistributedDataParallel.

The program, and the libraries that wrap models deep inside, need no change::

    torchrun --nproc-per-node 2 -m fastsync.run train.py --lr 0.1
    python -m fastsync.run --with wire=bf16 torchrun --nproc-per-node 2 train.py --lr 0.1
    mpirun -n 2 python -m fastsync.run train.py --lr 0.1

Processes that the program starts replace it too: the command sets FASTSYNC_REPLACE_DDP for them,
and puts a `sitecustomize` that reads it on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fastsync._build.env import (
    DDP_OPTIONS,
    ask_to_replace,
    ddp_options,
    has_rank,
    launched_by_mpi,
)
from fastsync.config.arguments import grouped
from fastsync.replacing import is_replaced, replace_ddp

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    kinds = {str: "text", int: "number", float: "number", bool: "true or false"}
    known = "\n".join(f"  {name:<30} {kinds[kind]}" for name, kind in DDP_OPTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.run",
        usage="%(prog)s [--with NAME=VALUE[,NAME=VALUE...]] [--sync MODE:STEPS] [-m] PROGRAM "
        "[ARGUMENT ...]",
        description="Runs PROGRAM with FastDDP wherever it builds a DistributedDataParallel.",
        epilog=f"options of FastDDP, which win over the program's own:\n{known}\n\n"
        "examples:\n"
        "  torchrun --nproc-per-node 2 -m fastsync.run train.py --lr 0.1\n"
        "  python -m fastsync.run --with wire=bf16 torchrun --nproc-per-node 2 train.py\n"
        "  python -m fastsync.run --sync diloco:64 torchrun --nproc-per-node 2 train.py\n"
        "  FASTSYNC_REPLACE_DDP=wire=bf16 torchrun --nproc-per-node 2 -m fastsync.run train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--with",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of FastDDP; may be repeated, or hold several separated by commas",
    )
    parser.add_argument(
        "--sync",
        metavar="MODE:STEPS",
        help="average parameters every STEPS optimizer steps: local, diloco or delayed; as --with "
        "sync=MODE:STEPS",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is a module's name")
    parser.add_argument("program", metavar="PROGRAM", help="a script, a module, or a command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv`; end as the program ends."""
    parser = _parser()
    args = parser.parse_args(argv)
    text = ",".join([*args.options, *([f"sync={args.sync}"] if args.sync else [])])
    try:
        options = ddp_options(text or "1") or {}
    except ValueError as error:
        parser.error(str(error).replace("FASTSYNC_REPLACE_DDP=", "--with "))
    if is_replaced() and text:
        parser.error(
            "FASTSYNC_REPLACE_DDP, or a fastsync.run that started this one, has replaced "
            "DistributedDataParallel already; give the options in one place"
        )
    if not is_replaced():
        ask_to_replace(text or "1")
    if args.module or _is_script(args.program):
        if not is_replaced():
            replace_ddp(**grouped(options))
        if launched_by_mpi() and not has_rank():
            _join_mpi()
        _run(args.program, args.arguments, args.module)
        return
    command = shutil.which(args.program)
    if command is None:
        parser.error(f"{args.program!r} is neither a script nor a command; a module needs -m")
    os.execv(command, [args.program, *args.arguments])


def _join_mpi() -> None:
    """Give the program torchrun's variables, and the backend of MPI."""
    try:
        import fastsync.mpi  # noqa: F401
    except ImportError as error:  # a program that asks its launcher itself needs neither
        print(f"fastsync.run: {error}", file=sys.stderr)


def _is_script(program: str) -> bool:
    return program.endswith(".py") or (Path(program).is_dir() and not shutil.which(program))


def _run(program: str, arguments: Sequence[str], module: bool) -> None:
    """Run as Python itself would: the program finds its own folder first on the path."""
    sys.argv = [program, *arguments]
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
