"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.errors import CheckFailed, MissingRights, UsageError
from bench.models import WORKLOADS, Workload
from bench.wrappers import VARIANTS

FAILED = 1
USAGE = 2
NO_RIGHTS = 3


def add_arguments(
    parser: argparse.ArgumentParser, models: str, several_worlds: bool = False
) -> None:
    """Adds the options every benchmark has.

    Args:
        models: the default of --models.
        several_worlds: --ranks is a text of several numbers, for bench.jobs.worlds.
    """
    parser.add_argument(
        "--models", default=models, help=f"of {', '.join(WORKLOADS)} (default: {models})"
    )
    parser.add_argument(
        "--scale",
        type=float,
        help="share of a model's parameters, 1 being its true size (default: what suits 2 cores)",
    )
    parser.add_argument(
        "--wrappers", default="all", help=f"all, or of {', '.join(VARIANTS)} (default: all)"
    )
    how: dict[str, Any] = {"default": "2"} if several_worlds else {"type": int, "default": 2}
    example = ", one number or several, such as 2,4" if several_worlds else ""
    parser.add_argument(
        "--ranks", help=f"processes to start{example}; torchrun's wins (default: 2)", **how
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)"
    )
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")


def add_sockets_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --sockets, which becomes `Job.over_sockets`."""
    parser.add_argument(
        "--sockets",
        action="store_true",
        help="ranks on GPUs talk over loopback sockets, as on hosts of their own; they may share "
        "a GPU where there are too few",
    )


def models(names: str) -> list[str]:
    """Parses a comma-separated list of models.

    Raises:
        UsageError: a name is unknown.
    """
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"unknown model {unknown}; expects some of {', '.join(WORKLOADS)}")
    return wanted


def workload(name: str, args: argparse.Namespace) -> Workload:
    """The model of that name, at the scale asked for, which is 1 by default where there is a GPU.

    Raises:
        UsageError: the scale is not positive.
    """
    scale = 1.0 if args.scale is None and torch.cuda.is_available() else args.scale
    if scale is None:
        return WORKLOADS[name]()
    if scale <= 0.0:
        raise UsageError(f"expects a positive --scale but got {scale}")
    return WORKLOADS[name](scale=scale)


def guarded(run: Callable[[], int]) -> int:
    """Runs a benchmark and turns its expected errors into a line of text and an exit code."""
    try:
        return run()
    except CheckFailed as error:
        _say_once(f"correctness check failed: {error}")
        return FAILED
    except UsageError as error:
        _say_once(f"error: {error}")
        return USAGE
    except MissingRights as error:
        _say_once(f"cannot run here: {error}")
        return NO_RIGHTS


def _say_once(message: str) -> None:
    """These errors come up on every rank alike; the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
