"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from bench.errors import CheckFailed, MissingRights, UsageError
from bench.models import WORKLOADS
from bench.wrappers import VARIANTS

FAILED = 1
USAGE = 2
NO_RIGHTS = 3


def add_arguments(parser: argparse.ArgumentParser, models: str) -> None:
    """Adds the options every benchmark has.

    Args:
        models: the default of --models.
    """
    parser.add_argument(
        "--models", default=models, help=f"of {', '.join(WORKLOADS)} (default: {models})"
    )
    parser.add_argument(
        "--wrappers", default="all", help=f"all, or of {', '.join(VARIANTS)} (default: all)"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start; torchrun's wins (default: 2)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)"
    )
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")


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
